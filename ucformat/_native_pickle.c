/* The opcodes of pickles: what `sources/pickle/unpickler.py` does in Python where this file was not built.

Only plain values are made here. What globals, calls, states, persistent ids and keys that are not text mean is decided
in one place, `sources/pickle/unpickler.py`, whose functions are called; nothing that a pickle names ever is. Memory is
proportional to what has been read, as an opcode adds at most one value to the stack or the memo, and nothing recurses. */

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define FIRST_ROOM 64              /* values that an array has room for at first */
#define BETWEEN_SIGNALS (1u << 16) /* opcodes after which a signal is handled */

typedef struct {
    PyObject **values; /* owned; NULL is a mark in the stack, and a number without a value in the memo */
    Py_ssize_t count, room;
} Array;

typedef struct {
    const uint8_t *begin, *at, *end;
    Array stack, memo;
    Py_ssize_t kept;                     /* values in the memo */
    PyObject *meaning, *calls, *damaged; /* borrowed from the arguments */
} Machine;

static int broken(const Machine *m, const char *how) {
    PyErr_SetString(m->damaged, how);
    return -1;
}

static int too_few(const Machine *m) { return broken(m, "its pickle takes more values than there are"); }

static int no_room(Array *array, Py_ssize_t count) {
    if (count <= array->room) return 0;
    Py_ssize_t room = array->room ? 2 * array->room : FIRST_ROOM;
    if (room < count) room = count;
    PyObject **values = PyMem_Realloc(array->values, (size_t)room * sizeof *values);
    if (!values) {
        PyErr_NoMemory();
        return -1;
    }
    array->values = values;
    array->room = room;
    return 0;
}

static void release(Array *array) {
    while (array->count) Py_XDECREF(array->values[--array->count]);
    PyMem_Free(array->values);
}

/* Puts a value onto the stack, which owns it then; NULL: making it has failed. */
static int push(Machine *m, PyObject *value) {
    if (!value) return -1;
    if (no_room(&m->stack, m->stack.count + 1)) {
        Py_DECREF(value);
        return -1;
    }
    m->stack.values[m->stack.count++] = value;
    return 0;
}

static int push_mark(Machine *m) {
    if (no_room(&m->stack, m->stack.count + 1)) return -1;
    m->stack.values[m->stack.count++] = NULL;
    return 0;
}

/* The last `n` values, none of which is below a mark; NULL: there are fewer. */
static PyObject **top(const Machine *m, Py_ssize_t n) {
    for (Py_ssize_t k = 1; k <= n; k++) {
        if (k > m->stack.count || !m->stack.values[m->stack.count - k]) {
            too_few(m);
            return NULL;
        }
    }
    return m->stack.values + (m->stack.count - n);
}

static int drop(Machine *m, Py_ssize_t n) {
    while (n--) Py_XDECREF(m->stack.values[--m->stack.count]);
    return 0;
}

/* The number of values above the last mark; -1: there is no mark. */
static Py_ssize_t above_mark(const Machine *m) {
    for (Py_ssize_t n = 0; n < m->stack.count; n++)
        if (!m->stack.values[m->stack.count - 1 - n]) return n;
    return broken(m, "its pickle ends a list of values that it did not begin");
}

/* Moves the last `n` values from the stack to a list; and removes the mark below them, if they are `marked`. */
static PyObject *listed(Machine *m, Py_ssize_t n, int marked) {
    PyObject *list = n < 0 ? NULL : PyList_New(n);
    if (!list) return NULL;
    PyObject **from = m->stack.values + (m->stack.count -= n);
    for (Py_ssize_t k = 0; k < n; k++) PyList_SetItem(list, k, from[k]);
    m->stack.count -= marked;
    return list;
}

static int push_tuple(Machine *m, Py_ssize_t n, int marked) {
    PyObject *tuple = n < 0 ? NULL : PyTuple_New(n);
    if (!tuple) return -1;
    PyObject **from = m->stack.values + (m->stack.count -= n);
    for (Py_ssize_t k = 0; k < n; k++) PyTuple_SetItem(tuple, k, from[k]);
    m->stack.count -= marked;
    return push(m, tuple);
}

/* Replaces the last `n` values (at most 3) by what the function for the opcode makes of them. */
static int call(Machine *m, uint8_t opcode, int n) {
    PyObject **v = top(m, n);
    if (!v) return -1;
    PyObject *made = PyObject_CallFunctionObjArgs(PyTuple_GetItem(m->calls, opcode), m->meaning, n > 0 ? v[0] : NULL,
                                                  n > 1 ? v[1] : NULL, n > 2 ? v[2] : NULL, NULL);
    if (!made) return -1;
    drop(m, n);
    return push(m, made);
}

static int are_texts(PyObject **values, Py_ssize_t n) {
    for (Py_ssize_t k = 0; k < n; k += 2)
        if (!PyUnicode_CheckExact(values[k])) return 0;
    return 1;
}

/* Adds the last `n` values to the one below them, and below a mark if they are `marked`. The usual ones are added here:
any value to a list, and values by text, whose hash cannot be chosen by the file, to a dictionary. */
static int add(Machine *m, uint8_t opcode, Py_ssize_t n, int marked) {
    if (n < 0) return -1;
    Py_ssize_t at = m->stack.count - n - marked - 1;
    if (at < 0 || !m->stack.values[at]) return too_few(m);
    PyObject *target = m->stack.values[at], **first = m->stack.values + at + 1 + marked;
    if (opcode == 'e' && PyList_CheckExact(target)) {
        for (Py_ssize_t k = 0; k < n; k++)
            if (PyList_Append(target, first[k])) return -1;
        return drop(m, n + marked);
    }
    if (opcode == 'u' && n % 2 == 0 && PyDict_CheckExact(target) && are_texts(first, n)) {
        for (Py_ssize_t k = 0; k < n; k += 2)
            if (PyDict_SetItem(target, first[k], first[k + 1])) return -1;
        return drop(m, n + marked);
    }
    return push(m, listed(m, n, marked)) ? -1 : call(m, opcode, 2);
}

/* The next `n` bytes. */
static const char *taken(Machine *m, uint64_t n) {
    if (n > (uint64_t)(m->end - m->at)) {
        broken(m, "its pickle ends in the middle of a value");
        return NULL;
    }
    m->at += n;
    return (const char *)m->at - n;
}

/* A little-endian number without a sign, of so many bytes. */
static int number(Machine *m, int width, uint64_t *value) {
    const char *from = taken(m, (uint64_t)width);
    *value = 0;
    for (int k = 0; from && k < width; k++) *value |= (uint64_t)(uint8_t)from[k] << 8 * k;
    return from ? 0 : -1;
}

/* As many bytes as the number before them says; sets the number. */
static const char *counted(Machine *m, int width, uint64_t *n) { return number(m, width, n) ? NULL : taken(m, *n); }

static int push_text(Machine *m, int width) {
    uint64_t n;
    const char *from = counted(m, width, &n);
    return from ? push(m, PyUnicode_DecodeUTF8(from, (Py_ssize_t)n, NULL)) : -1;
}

static int push_old_text(Machine *m, int width) {
    uint64_t n;
    const char *from = counted(m, width, &n);
    return from ? push(m, PyUnicode_DecodeLatin1(from, (Py_ssize_t)n, NULL)) : -1;
}

static int push_bytes(Machine *m, int width, PyObject *(*make)(const char *, Py_ssize_t)) {
    uint64_t n;
    const char *from = counted(m, width, &n);
    return from ? push(m, make(from, (Py_ssize_t)n)) : -1;
}

/* An integer in two's complement; a function makes those of more than eight bytes. */
static int push_long(Machine *m, int width) {
    uint64_t n, value = 0;
    const char *from = counted(m, width, &n);
    if (!from) return -1;
    if (n > 8) return push(m, PyBytes_FromStringAndSize(from, (Py_ssize_t)n)) ? -1 : call(m, 0x8a, 1);
    for (uint64_t k = 0; k < n; k++) value |= (uint64_t)(uint8_t)from[k] << 8 * k;
    if (n && n < 8 && from[n - 1] & 0x80) value |= UINT64_MAX << 8 * n;
    return push(m, PyLong_FromLongLong((int64_t)value));
}

static int push_float(Machine *m) {
    const char *from = taken(m, 8);
    uint64_t bits = 0;
    double value;
    if (!from) return -1;
    for (int k = 0; k < 8; k++) bits = bits << 8 | (uint8_t)from[k];
    memcpy(&value, &bits, 8);
    return push(m, PyFloat_FromDouble(value));
}

static int push_line(Machine *m) {
    const uint8_t *end = memchr(m->at, '\n', (size_t)(m->end - m->at));
    if (!end) return taken(m, UINT64_MAX) ? 0 : -1;
    const char *from = (const char *)m->at;
    m->at = end + 1;
    return push(m, PyUnicode_DecodeUTF8(from, (const char *)end - from, NULL));
}

static int recall(Machine *m, int width) {
    uint64_t index;
    if (number(m, width, &index)) return -1;
    if (index < (uint64_t)m->memo.count && m->memo.values[index]) return push(m, Py_NewRef(m->memo.values[index]));
    PyErr_Format(m->damaged, "its pickle refers to value %zd of the memo, which it never stored", (Py_ssize_t)index);
    return -1;
}

/* Stores the last value in the memo. Numbers are given in turn, so that none is as large as the bytes read: the memo is
an array, and not larger than the file justifies. */
static int keep(Machine *m, uint64_t number) {
    Py_ssize_t index = (Py_ssize_t)number;
    PyObject **value = top(m, 1);
    if (!value) return -1;
    if (index >= m->at - m->begin) {
        PyErr_Format(m->damaged, "its pickle stores value %zd of the memo, but has fewer values so far", index);
        return -1;
    }
    if (no_room(&m->memo, index + 1)) return -1;
    while (m->memo.count <= index) m->memo.values[m->memo.count++] = NULL;
    PyObject *before = m->memo.values[index];
    m->memo.values[index] = Py_NewRef(*value);
    m->kept += !before;
    Py_XDECREF(before);
    return 0;
}

static int keep_numbered(Machine *m, int width) {
    uint64_t index;
    return number(m, width, &index) ? -1 : keep(m, index);
}

static int step(Machine *m, uint8_t opcode) {
    uint64_t n;
    switch (opcode) {
        case 'N': return push(m, Py_NewRef(Py_None));
        case 0x88: return push(m, Py_NewRef(Py_True));
        case 0x89: return push(m, Py_NewRef(Py_False));
        case 'J': return number(m, 4, &n) ? -1 : push(m, PyLong_FromLong((int32_t)n));
        case 'K': return number(m, 1, &n) ? -1 : push(m, PyLong_FromLong((long)n));
        case 'M': return number(m, 2, &n) ? -1 : push(m, PyLong_FromLong((long)n));
        case 0x8a: return push_long(m, 1);
        case 0x8b: return push_long(m, 4);
        case 'G': return push_float(m);
        case 'X': return push_text(m, 4);
        case 0x8c: return push_text(m, 1);
        case 0x8d: return push_text(m, 8);
        case 'T': return push_old_text(m, 4);
        case 'U': return push_old_text(m, 1);
        case 'B': return push_bytes(m, 4, PyBytes_FromStringAndSize);
        case 'C': return push_bytes(m, 1, PyBytes_FromStringAndSize);
        case 0x8e: return push_bytes(m, 8, PyBytes_FromStringAndSize);
        case 0x96: return push_bytes(m, 8, PyByteArray_FromStringAndSize);
        case ']': return push(m, PyList_New(0));
        case '}': return push(m, PyDict_New());
        case ')': return push(m, PyTuple_New(0));
        case 0x8f: return push(m, PySet_New(NULL));
        case '(': return push_mark(m);
        case '0': return m->stack.count ? drop(m, 1) : too_few(m); /* or a mark */
        case '1': {
            Py_ssize_t k = above_mark(m);
            return k < 0 ? -1 : drop(m, k + 1);
        }
        case '2': {
            PyObject **last = top(m, 1);
            return last ? push(m, Py_NewRef(*last)) : -1;
        }
        case 'l': return push(m, listed(m, above_mark(m), 1));
        case 't': return push_tuple(m, above_mark(m), 1);
        case 0x85: return top(m, 1) ? push_tuple(m, 1, 0) : -1;
        case 0x86: return top(m, 2) ? push_tuple(m, 2, 0) : -1;
        case 0x87: return top(m, 3) ? push_tuple(m, 3, 0) : -1;
        case 'a': return top(m, 2) ? add(m, 'e', 1, 0) : -1;
        case 's': return top(m, 3) ? add(m, 'u', 2, 0) : -1;
        case 'e':
        case 'u':
        case 0x90: return add(m, opcode, above_mark(m), 1);
        case 'd':
        case 0x91: return push(m, listed(m, above_mark(m), 1)) ? -1 : call(m, opcode, 1);
        case 'h': return recall(m, 1);
        case 'j': return recall(m, 4);
        case 'q': return keep_numbered(m, 1);
        case 'r': return keep_numbered(m, 4);
        case 0x94: return keep(m, (uint64_t)m->kept);
        case 0x95: return taken(m, 8) ? 0 : -1;
        case 0x80:
            if (number(m, 1, &n) || push(m, PyLong_FromLong((long)n)) || call(m, opcode, 1)) return -1;
            return drop(m, 1);
        case 'c': return push_line(m) || push_line(m) ? -1 : call(m, opcode, 2);
        case 'Q': return call(m, opcode, 1);
        case 'R':
        case 'b':
        case 0x81:
        case 0x93: return call(m, opcode, 2);
        case 0x92: return call(m, opcode, 3);
        default: return call(m, opcode, 0); /* which refuses it */
    }
}

PyObject *interpret(PyObject *module, PyObject *args) {
    PyObject *data, *found = NULL;
    Machine m = {0};
    char *bytes;
    Py_ssize_t size;
    (void)module;
    if (!PyArg_ParseTuple(args, "SOO!O", &data, &m.meaning, &PyTuple_Type, &m.calls, &m.damaged)) return NULL;
    if (PyTuple_Size(m.calls) != 256) {
        PyErr_SetString(PyExc_ValueError, "there is not one function for each opcode");
        return NULL;
    }
    if (PyBytes_AsStringAndSize(data, &bytes, &size) || no_room(&m.stack, FIRST_ROOM)) return NULL;
    m.begin = m.at = (const uint8_t *)bytes;
    m.end = m.begin + size;
    for (unsigned n = 1;; n++) {
        const char *opcode = taken(&m, 1);
        if (!opcode) break;
        if (*opcode == '.') {
            PyObject **last = top(&m, 1);
            if (last) found = Py_NewRef(*last);
            break;
        }
        if (step(&m, (uint8_t)*opcode) || (n % BETWEEN_SIGNALS == 0 && PyErr_CheckSignals())) break;
    }
    release(&m.stack);
    release(&m.memo);
    return found;
}
