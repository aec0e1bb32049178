/* Tiles as the bytes of a packed file: each followed by its checksum, and its part in the fingerprint of its tensor. */

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

uint32_t crc32c_bytes(uint32_t crc, const uint8_t *p, size_t n); /* _native.c */
void add_run(const char *words, size_t nbytes, uint64_t at, size_t count, uint64_t sums[2]); /* _native_fingerprint.c */

#define WORD 4 /* bytes of a word of a fingerprint; those of smaller elements have as many as these */

/* The tiles of a call: where each begins in the target, and its first element in its tensor (-1: no run of elements). */
typedef struct {
    Py_buffer target, starts, places, sums, *views;
    Py_ssize_t open;
    uint32_t file;      /* checksum of the name of the file */
    long long begin;    /* byte of the file at which the target begins */
} Packed;

static int open_tiles(Packed *all, PyObject *elements) {
    Py_ssize_t count = PyList_Size(elements), end = 0;
    if (all->starts.len != count * 8 || all->places.len != count * 8 || all->sums.len != count * 16) {
        PyErr_SetString(PyExc_ValueError, "the columns do not have a row for each tile");
        return -1;
    }
    if (!(all->views = PyMem_Calloc((size_t)count + 1, sizeof(Py_buffer)))) {
        PyErr_NoMemory();
        return -1;
    }
    while (all->open < count) {
        Py_buffer *view = &all->views[all->open];
        int64_t start = ((int64_t *)all->starts.buf)[all->open];
        if (PyObject_GetBuffer(PyList_GetItem(elements, all->open), view, PyBUF_SIMPLE)) return -1;
        all->open++;
        if (view->itemsize < 1 || (view->itemsize > WORD && view->itemsize % WORD) || view->itemsize == 3) {
            PyErr_SetString(PyExc_ValueError, "an element has 1, 2, 4, 8 or 16 bytes");
            return -1;
        }
        if (start < end || view->len > all->target.len || start > all->target.len - view->len - 4) {
            PyErr_SetString(PyExc_ValueError, "the tiles overlap, or do not fit");
            return -1;
        }
        end = start + view->len + 4;
    }
    return 0;
}

static void pack_all(const Packed *all) {
    char *end = all->target.buf;
    for (Py_ssize_t k = 0; k < all->open; k++) {
        const Py_buffer *view = &all->views[k];
        int64_t start = ((int64_t *)all->starts.buf)[k], place = ((int64_t *)all->places.buf)[k];
        uint64_t at = (uint64_t)(all->begin + start), *sums = (uint64_t *)all->sums.buf + 2 * k;
        size_t n = (size_t)view->len, word = view->itemsize < WORD ? (size_t)view->itemsize : WORD;
        char *tile = (char *)all->target.buf + start;
        memset(end, 0, (size_t)(tile - end));
        if (tile != view->buf) memcpy(tile, view->buf, n);
        uint32_t crc = crc32c_bytes(crc32c_bytes(all->file, (const uint8_t *)&at, 8), (const uint8_t *)tile, n);
        memcpy(tile + n, &crc, 4);
        end = tile + n + 4;
        sums[0] = sums[1] = 0;
        if (place >= 0) add_run(tile, word, (uint64_t)place * ((size_t)view->itemsize / word), n / word, sums);
    }
    memset(end, 0, (size_t)((char *)all->target.buf + all->target.len - end));
}

PyObject *pack(PyObject *module, PyObject *args) {
    PyObject *elements, *result = NULL;
    Packed all = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "w*ILO!y*y*w*", &all.target, &all.file, &all.begin, &PyList_Type, &elements,
                          &all.starts, &all.places, &all.sums))
        return NULL;
    if (!open_tiles(&all, elements)) {
        Py_BEGIN_ALLOW_THREADS
        pack_all(&all);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    while (all.open) PyBuffer_Release(&all.views[--all.open]);
    PyMem_Free(all.views);
    PyBuffer_Release(&all.target);
    PyBuffer_Release(&all.starts);
    PyBuffer_Release(&all.places);
    PyBuffer_Release(&all.sums);
    return result;
}
