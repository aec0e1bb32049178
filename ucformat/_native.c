/* Loops that Python cannot run at memory speed: scattered reads, CRC-32C and CRC-32 of strided memory, copies, writes.

A buffer here is anything with the buffer protocol whose last dim is contiguous; its bytes are taken row by row, in C
order. All functions release the GIL. `storage/strided.py` has the same functions in Python, for platforms that this
file is not built for. */

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <immintrin.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_DIMS 64
#define MAX_VECTORS 1024 /* IOV_MAX of Linux */
#define PIECE (256 << 10) /* bytes that are written at once, or read at once if they are checked or copied */
#define LINE 64           /* bytes of a line of the cache */
#define PAGE 4096
#define CHECKED_ROW 2048 /* bytes of rows from which on each is checked by itself while it is copied */

/* The rows of a buffer: runs of contiguous bytes at the indices of the leading dims. */
typedef struct {
    char *row;
    Py_ssize_t run;  /* bytes */
    Py_ssize_t left; /* rows, with this one */
    int dims;        /* leading dims that no run spans */
    Py_ssize_t shape[MAX_DIMS], strides[MAX_DIMS], at[MAX_DIMS];
} Rows;

static int rows_of(const Py_buffer *view, Rows *rows) {
    if (view->ndim > MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "a buffer has more than %d dims", MAX_DIMS);
        return -1;
    }
    rows->row = view->buf;
    rows->run = view->itemsize;
    rows->left = 1;
    rows->dims = 0;
    int d = view->ndim - 1;
    for (; d >= 0 && (view->shape[d] == 1 || view->strides[d] == rows->run); d--) rows->run *= view->shape[d];
    if (d >= 0 && d == view->ndim - 1 && view->shape[d] > 1) {
        PyErr_SetString(PyExc_ValueError, "the last dim of a buffer is not contiguous");
        return -1;
    }
    for (int k = 0; k <= d; k++) {
        if (view->shape[k] == 1) continue;
        rows->shape[rows->dims] = view->shape[k];
        rows->strides[rows->dims] = view->strides[k];
        rows->at[rows->dims++] = 0;
        rows->left *= view->shape[k];
    }
    if (view->len == 0) rows->left = 0;
    return 0;
}

static void next_row(Rows *rows) {
    rows->left--;
    for (int d = rows->dims - 1; d >= 0; d--) {
        rows->row += rows->strides[d];
        if (++rows->at[d] < rows->shape[d]) return;
        rows->row -= rows->strides[d] * rows->shape[d];
        rows->at[d] = 0;
    }
}

/* CRCs with a reflected polynomial, by multiplication without carry, which folds a block onto one that is D bytes later
by x^(8D+31) and x^(8D-33) modulo the polynomial (Gopal et al., "Fast CRC Computation Using PCLMULQDQ Instruction", Intel
2009). The rest takes an instruction for eight bytes of CRC-32C, a table for the CRC-32 of zip files. */

typedef struct {
    uint32_t by256[2], by128[2], by64[2], by48[2], by32[2], by16[2]; /* x^(8D+31), x^(8D-33) */
    uint32_t (*words)(uint32_t, const uint8_t *, size_t);
} Polynomial;

__attribute__((target("sse4.2"))) static uint32_t castagnoli_words(uint32_t crc, const uint8_t *p, size_t n) {
    uint64_t c = crc;
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        c = _mm_crc32_u64(c, word);
    }
    for (; n; p++, n--) c = _mm_crc32_u8((uint32_t)c, *p);
    return (uint32_t)c;
}

static uint32_t zip_table[256];

static uint32_t zip_words(uint32_t crc, const uint8_t *p, size_t n) {
    for (; n; p++, n--) crc = zip_table[(uint8_t)crc ^ *p] ^ crc >> 8;
    return crc;
}

static const Polynomial castagnoli = {{0xdcb17aa4, 0xb9e02b86}, {0x6992cea2, 0x0d3b6092}, {0x740eef02, 0x9e4addf8},
                                      {0x1c291d04, 0xddc0152b}, {0x3da6d0cb, 0xba4fc28e}, {0xf20c0dfe, 0x493c7d27},
                                      castagnoli_words};
static const Polynomial zip = {{0xce3371cb, 0xe95c1271}, {0x33fff533, 0x910eeec1}, {0x8f352d95, 0x1d9513d7},
                               {0x3db1ecdc, 0xaf449247}, {0xf1da05aa, 0x81256527}, {0xae689191, 0xccaa009e}, zip_words};

#define FACTORS(by) _mm_set_epi64x((by)[1], (by)[0])
#define FOLD128(x, k, y) \
    _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), y)

static uint32_t finish(const Polynomial *of, __m128i x, const uint8_t *p, size_t n) {
    uint8_t folded[16];
    memcpy(folded, &x, 16);
    return of->words(of->words(0, folded, 16), p, n);
}

/* The CRC of bytes, which are also stored past the cache to `to`, the beginning of a line, unless it is NULL. */
#define INLINE static inline __attribute__((always_inline))

__attribute__((target("sse4.2,pclmul"))) INLINE uint32_t fold_sse(
    const Polynomial *of, uint32_t crc, const uint8_t *p, size_t n, char *to) {
    if (n < 128) {
        if (to) memcpy(to, p, n);
        return of->words(crc, p, n);
    }
    const __m128i by64 = FACTORS(of->by64), by16 = FACTORS(of->by16);
    __m128i x[4], y;
    for (int k = 0; k < 4; k++) {
        x[k] = _mm_loadu_si128((const __m128i *)p + k);
        if (to) _mm_stream_si128((__m128i *)to + k, x[k]);
    }
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)crc));
    for (p += 64, n -= 64; n >= 64; p += 64, n -= 64) {
        if (to) to += 64;
        for (int k = 0; k < 4; k++) {
            y = _mm_loadu_si128((const __m128i *)p + k);
            if (to) _mm_stream_si128((__m128i *)to + k, y);
            x[k] = FOLD128(x[k], by64, y);
        }
    }
    if (to) memcpy(to + 64, p, n);
    for (int k = 1; k < 4; k++) x[k] = FOLD128(x[k - 1], by16, x[k]);
    return finish(of, x[3], p, n);
}

__attribute__((target("sse4.2,pclmul"))) static uint32_t crc_sse(
    const Polynomial *of, uint32_t crc, const uint8_t *p, size_t n) {
    return fold_sse(of, crc, p, n, NULL);
}

__attribute__((target("sse4.2,pclmul"))) static uint32_t crc_stream_sse(
    const Polynomial *of, uint32_t crc, const uint8_t *p, size_t n, char *to) {
    return fold_sse(of, crc, p, n, to);
}

#define FOLD256(x, k, y)                                                                                            \
    _mm256_xor_si256(                                                                                               \
        _mm256_xor_si256(_mm256_clmulepi64_epi128(x, k, 0x00), _mm256_clmulepi64_epi128(x, k, 0x11)), y)
#define LOAD256(p) _mm256_loadu_si256((const __m256i *)(p))

__attribute__((target("avx2,vpclmulqdq,sse4.2,pclmul"))) INLINE uint32_t fold_avx2(
    const Polynomial *of, uint32_t crc, const uint8_t *p, size_t n, char *to) {
    if (n < 256) {
        if (to) memcpy(to, p, n);
        return crc_sse(of, crc, p, n);
    }
    const __m256i by128 = _mm256_broadcastsi128_si256(FACTORS(of->by128));
    const __m256i by32 = _mm256_broadcastsi128_si256(FACTORS(of->by32));
    __m256i x[4], y;
    for (int k = 0; k < 4; k++) {
        x[k] = LOAD256(p + 32 * k);
        if (to) _mm256_stream_si256((__m256i *)to + k, x[k]);
    }
    x[0] = _mm256_xor_si256(x[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128((int)crc)));
    for (p += 128, n -= 128; n >= 128; p += 128, n -= 128) {
        if (to) to += 128;
        for (int k = 0; k < 4; k++) {
            y = LOAD256(p + 32 * k);
            if (to) _mm256_stream_si256((__m256i *)to + k, y);
            x[k] = FOLD256(x[k], by128, y);
        }
    }
    if (to) memcpy(to + 128, p, n);
    for (int k = 1; k < 4; k++) x[k] = FOLD256(x[k - 1], by32, x[k]);
    __m128i a = _mm256_extracti128_si256(x[3], 1);
    return finish(of, FOLD128(_mm256_castsi256_si128(x[3]), FACTORS(of->by16), a), p, n);
}

__attribute__((target("avx2,vpclmulqdq,sse4.2,pclmul"))) static uint32_t crc_avx2(
    const Polynomial *of, uint32_t crc, const uint8_t *p, size_t n) {
    return fold_avx2(of, crc, p, n, NULL);
}

__attribute__((target("avx2,vpclmulqdq,sse4.2,pclmul"))) static uint32_t crc_stream_avx2(
    const Polynomial *of, uint32_t crc, const uint8_t *p, size_t n, char *to) {
    return fold_avx2(of, crc, p, n, to);
}

#define FOLD512(x, k, y) \
    _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, k, 0x00), _mm512_clmulepi64_epi128(x, k, 0x11), y, 0x96)

__attribute__((target("avx512f,avx512vl,vpclmulqdq,sse4.2,pclmul"))) INLINE uint32_t fold_avx512(
    const Polynomial *of, uint32_t crc, const uint8_t *p, size_t n, char *to) {
    if (n < 512) {
        if (to) memcpy(to, p, n);
        return crc_sse(of, crc, p, n);
    }
    const __m512i by256 = _mm512_broadcast_i32x4(FACTORS(of->by256)), by64 = _mm512_broadcast_i32x4(FACTORS(of->by64));
    const __m128i by48 = FACTORS(of->by48), by32 = FACTORS(of->by32), by16 = FACTORS(of->by16);
    __m512i x[4], y;
    for (int k = 0; k < 4; k++) {
        x[k] = _mm512_loadu_si512(p + 64 * k);
        if (to) _mm512_stream_si512((__m512i *)to + k, x[k]);
    }
    x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    for (p += 256, n -= 256; n >= 256; p += 256, n -= 256) {
        if (to) to += 256;
        for (int k = 0; k < 4; k++) {
            y = _mm512_loadu_si512(p + 64 * k);
            if (to) _mm512_stream_si512((__m512i *)to + k, y);
            x[k] = FOLD512(x[k], by256, y);
        }
    }
    if (to) memcpy(to + 256, p, n);
    for (int k = 1; k < 4; k++) x[k] = FOLD512(x[k - 1], by64, x[k]);
    __m128i a = _mm512_extracti32x4_epi32(x[3], 3);
    a = FOLD128(_mm512_extracti32x4_epi32(x[3], 2), by16, a);
    a = FOLD128(_mm512_extracti32x4_epi32(x[3], 1), by32, a);
    a = FOLD128(_mm512_castsi512_si128(x[3]), by48, a);
    return finish(of, a, p, n);
}

__attribute__((target("avx512f,avx512vl,vpclmulqdq,sse4.2,pclmul"))) static uint32_t crc_avx512(
    const Polynomial *of, uint32_t crc, const uint8_t *p, size_t n) {
    return fold_avx512(of, crc, p, n, NULL);
}

__attribute__((target("avx512f,avx512vl,vpclmulqdq,sse4.2,pclmul"))) static uint32_t crc_stream_avx512(
    const Polynomial *of, uint32_t crc, const uint8_t *p, size_t n, char *to) {
    return fold_avx512(of, crc, p, n, to);
}

static uint32_t (*crc_bytes)(const Polynomial *, uint32_t, const uint8_t *, size_t);
static uint32_t (*crc_stream)(const Polynomial *, uint32_t, const uint8_t *, size_t, char *);

uint32_t crc32c_bytes(uint32_t crc, const uint8_t *p, size_t n) { return ~crc_bytes(&castagnoli, ~crc, p, n); }

static PyObject *crc_of(const Polynomial *of, PyObject *args) {
    PyObject *buffer;
    unsigned int value = 0;
    Py_buffer view;
    Rows rows;
    if (!PyArg_ParseTuple(args, "O|I", &buffer, &value)) return NULL;
    if (PyObject_GetBuffer(buffer, &view, PyBUF_STRIDES)) return NULL;
    if (rows_of(&view, &rows)) {
        PyBuffer_Release(&view);
        return NULL;
    }
    uint32_t crc = ~value;
    Py_BEGIN_ALLOW_THREADS
    for (; rows.left; next_row(&rows)) crc = crc_bytes(of, crc, (const uint8_t *)rows.row, (size_t)rows.run);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(~crc & 0xffffffff);
}

static PyObject *crc32c(PyObject *module, PyObject *args) {
    (void)module;
    return crc_of(&castagnoli, args);
}

static PyObject *crc32(PyObject *module, PyObject *args) {
    (void)module;
    return crc_of(&zip, args);
}

static PyObject *crc32c_each(PyObject *module, PyObject *args) {
    Py_buffer items;
    Py_ssize_t nbytes;
    unsigned int before;
    PyObject *result = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*nI", &items, &nbytes, &before)) return NULL;
    if (nbytes < 1 || items.len % nbytes) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are no items of %zd", items.len, nbytes);
    } else if ((result = PyBytes_FromStringAndSize(NULL, items.len / nbytes * 4))) {
        char *to = PyBytes_AsString(result);
        const uint8_t *item = items.buf, *end = item + items.len;
        for (; item < end; item += nbytes, to += 4) {
            uint32_t crc = ~castagnoli.words(~before, item, (size_t)nbytes);
            memcpy(to, &crc, 4);
        }
    }
    PyBuffer_Release(&items);
    return result;
}

typedef struct {
    Rows rows;
    Py_ssize_t used; /* bytes of this row */
    size_t left;     /* bytes of all rows that have yet to be read */
    uint32_t crc;
} Target;

typedef struct {
    Target *targets;
    Py_ssize_t count, next;
    int check;
    char *scratch; /* of SCRATCH bytes, from the beginning of a page */
    struct iovec vectors[MAX_VECTORS];
} Targets;

/* The next `n` bytes of a target have been taken care of; they end in its current row. */
static void advance(Target *target, size_t n) {
    target->left -= n;
    target->used += (Py_ssize_t)n;
    if (target->used == target->rows.run) {
        target->used = 0;
        next_row(&target->rows);
    }
}

static Target *first_left(Targets *all) {
    while (all->next < all->count && !all->targets[all->next].left) all->next++;
    return all->next < all->count ? &all->targets[all->next] : NULL;
}

/* Whether the next bytes of a target are read into the scratch memory and copied from there, with the checksum, instead
of into place: rows are copied faster than `preadv` fills them. Also where a processor copies slowly because memory has a
place within its page that is less than a line after that of the file's bytes within theirs: AMD's Zen 3 takes five times
as long. */
static int is_copied(const Targets *all, const Target *target, off_t offset) {
    if (all->check || (target->rows.run < PIECE && target->rows.left > 1)) return 1;
    uintptr_t after = ((uintptr_t)(target->rows.row + target->used) - (uintptr_t)offset) % PAGE;
    return after && after < LINE;
}

/* Reads as much as goes into place at once. As `read_all`. */
static Py_ssize_t read_into_place(int fd, off_t offset, Targets *all, size_t *wanted) {
    int n = 0;
    *wanted = 0;
    for (Target *target; n < MAX_VECTORS && (target = first_left(all)); n++) {
        if (is_copied(all, target, offset + (off_t)*wanted)) break;
        size_t run = (size_t)(target->rows.run - target->used);
        all->vectors[n].iov_base = target->rows.row + target->used;
        all->vectors[n].iov_len = run;
        *wanted += run;
        advance(target, run);
    }
    size_t done = 0;
    for (int k = 0; k < n;) {
        ssize_t got = preadv(fd, all->vectors + k, n - k, offset + (off_t)done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -1;
        if (got == 0) break;
        done += (size_t)got;
        for (; got && (size_t)got >= all->vectors[k].iov_len; k++) got -= (ssize_t)all->vectors[k].iov_len;
        if (got) {
            all->vectors[k].iov_base = (char *)all->vectors[k].iov_base + got;
            all->vectors[k].iov_len -= (size_t)got;
        }
    }
    return (Py_ssize_t)done;
}

/* Copies bytes, whole lines of the cache past the cache: otherwise each line is read before it is written. */
#define STREAM(line)                                                 \
    size_t head = -(uintptr_t)to % LINE;                             \
    if (head > n) head = n;                                          \
    memcpy(to, from, head);                                          \
    for (to += head, from += head, n -= head; n >= 64; to += 64, from += 64, n -= 64) line; \
    memcpy(to, from, n);

static void stream_sse(char *to, const char *from, size_t n) {
    STREAM(for (int k = 0; k < 4; k++) _mm_stream_si128((__m128i *)to + k, _mm_loadu_si128((const __m128i *)from + k)))
}

__attribute__((target("avx2"))) static void stream_avx2(char *to, const char *from, size_t n) {
    STREAM(for (int k = 0; k < 2; k++) _mm256_stream_si256((__m256i *)to + k, LOAD256((const __m256i *)from + k)))
}

__attribute__((target("avx512f"))) static void stream_avx512(char *to, const char *from, size_t n) {
    STREAM(_mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from)))
}

static void (*stream)(char *, const char *, size_t);

#define FETCHED 4 /* rows that are fetched in advance before they are copied */
#define AHEAD 8 /* rows whose first and last lines are fetched in advance */
#define COPY_ROWS(copy)                                                                         \
    for (; count; count--, to += step, from += run) {                                           \
        if (!aligned) {                                                                         \
            __builtin_prefetch((char *)((uintptr_t)to + AHEAD * (uintptr_t)step), 1);           \
            __builtin_prefetch((char *)((uintptr_t)to + AHEAD * (uintptr_t)step + run - 1), 1); \
        }                                                                                       \
        copy;                                                                                   \
    }

/* Copies rows of `run` bytes to addresses that are `step` bytes apart. */
static void copy_rows(char *to, Py_ssize_t step, const char *from, size_t run, Py_ssize_t count) {
    int aligned = !(((uintptr_t)to | (uintptr_t)step | run) & 63);
    switch (run) {
        case 1: COPY_ROWS(memcpy(to, from, 1)); break;
        case 2: COPY_ROWS(memcpy(to, from, 2)); break;
        case 4: COPY_ROWS(memcpy(to, from, 4)); break;
        case 8: COPY_ROWS(memcpy(to, from, 8)); break;
        case 16: COPY_ROWS(memcpy(to, from, 16)); break;
        case 32: COPY_ROWS(memcpy(to, from, 32)); break;
        default:
            if (run < 64) COPY_ROWS(memcpy(to, from, run))
            else COPY_ROWS(stream(to, from, run))
    }
}

/* Copies bytes as `stream`, and continues the checksum of a target with them while they are copied. */
static void stream_checked(Target *target, char *to, const char *from, size_t n) {
    size_t head = -(uintptr_t)to % LINE;
    if (head > n) head = n;
    memcpy(to, from, head);
    target->crc = castagnoli.words(target->crc, (const uint8_t *)from, head);
    target->crc = crc_stream(&castagnoli, target->crc, (const uint8_t *)from + head, n - head, to + head);
}

/* Copies what was read to the next rows. */
static void scatter(Targets *all, const char *data, size_t n) {
    while (n) {
        Target *target = first_left(all);
        Rows *rows = &target->rows;
        size_t part = n < target->left ? n : target->left, whole = (size_t)rows->run;
        int by_row = all->check && whole >= CHECKED_ROW;
        if (all->check && !by_row) { /* some rows, which are copied while they are in the fastest cache */
            size_t some = whole - (size_t)target->used + (PAGE - whole) / whole * whole;
            if (part > some) part = some;
            target->crc = crc_bytes(&castagnoli, target->crc, (const uint8_t *)data, part);
        }
        n -= part;
        while (part) {
            size_t run = whole - (size_t)target->used, take = run < part ? run : part;
            int d = rows->dims - 1;
            if (!by_row && !target->used && d >= 0) { /* all rows at once up to the last one of this dim */
                Py_ssize_t count = rows->shape[d] - rows->at[d] - 1, fit = (Py_ssize_t)(part / run);
                if (count > fit) count = fit;
                copy_rows(rows->row, rows->strides[d], data, run, count);
                rows->row += count * rows->strides[d];
                rows->at[d] += count;
                rows->left -= count;
                target->left -= (size_t)count * run;
                data += (size_t)count * run;
                part -= (size_t)count * run;
                if (take > part) take = part;
            }
            if (by_row) stream_checked(target, rows->row + target->used, data, take);
            else stream(rows->row + target->used, data, take);
            data += take;
            part -= take;
            advance(target, take);
        }
    }
}

#define SCRATCH (PIECE + LINE)
#define SPARES 16
static _Atomic(char *) spares[SPARES]; /* scratch memory that no call uses: new memory costs as much as a piece */

static char *take_scratch(void) {
    for (int k = 0; k < SPARES; k++) {
        char *scratch = atomic_exchange(&spares[k], NULL);
        if (scratch) return scratch;
    }
    return aligned_alloc(PAGE, (SCRATCH + PAGE - 1) / PAGE * PAGE);
}

static void give_scratch(char *scratch) {
    for (int k = 0; k < SPARES && scratch; k++) scratch = atomic_exchange(&spares[k], scratch);
    free(scratch);
}

/* Reads a piece, and copies it to the next rows. As `read_all`. */
static Py_ssize_t read_and_copy(int fd, off_t offset, Targets *all, size_t *wanted) {
    size_t done = 0;
    *wanted = 0;
    for (Py_ssize_t k = all->next; k < all->count && *wanted < PIECE; k++) {
        Target *target = &all->targets[k];
        if (target->left && !is_copied(all, target, offset + (off_t)*wanted)) break;
        *wanted += target->left;
    }
    if (*wanted > PIECE) *wanted = PIECE;
    /* not at a place within the page that is copied to slowly, as in `is_copied` */
    char *scratch = all->scratch + ((uintptr_t)-offset % PAGE < LINE ? LINE : 0);
    while (done < *wanted) {
        ssize_t got = pread(fd, scratch + done, *wanted - done, offset + (off_t)done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -1;
        if (got == 0) break;
        done += (size_t)got;
    }
    scatter(all, scratch, done);
    _mm_sfence();
    return (Py_ssize_t)done;
}

/* Reads until all targets are full or the file ends; returns the bytes read, -1 with errno after an error. */
static Py_ssize_t read_all(int fd, off_t offset, Targets *all) {
    Py_ssize_t done = 0;
    for (Target *target; (target = first_left(all));) {
        size_t wanted;
        if (!all->scratch && is_copied(all, target, offset + done) && !(all->scratch = take_scratch())) {
            errno = ENOMEM;
            return -1;
        }
        Py_ssize_t got = (is_copied(all, target, offset + done) ? read_and_copy : read_into_place)(
            fd, offset + done, all, &wanted);
        if (got < 0) return -1;
        done += got;
        if ((size_t)got < wanted) break;
    }
    return done;
}

/* The buffers of a call. */
typedef struct {
    PyObject *buffers, *crcs; /* crcs: None, or a list */
    uint32_t *sums;           /* those of columns, instead of crcs */
    Py_ssize_t open;
    Py_buffer *views;
    Targets *all;
} Given;

static int open_targets(Given *given, PyObject *buffers, PyObject *crcs) {
    memset(given, 0, sizeof *given);
    given->crcs = crcs;
    if (!(given->buffers = PySequence_Tuple(buffers))) return -1;
    Py_ssize_t count = PyTuple_Size(given->buffers);
    given->views = PyMem_Calloc((size_t)count + 1, sizeof(Py_buffer));
    Targets *all = given->all = PyMem_Calloc(1, sizeof(Targets));
    if (!given->views || !all || !(all->targets = PyMem_Calloc((size_t)count + 1, sizeof(Target)))) {
        PyErr_NoMemory();
        return -1;
    }
    all->count = count;
    all->check = crcs != Py_None;
    if (all->check && (!PyList_Check(crcs) || PyList_Size(crcs) != count)) {
        PyErr_SetString(PyExc_ValueError, "crcs is not a list with a number for each buffer");
        return -1;
    }
    while (given->open < count) {
        Py_buffer *view = &given->views[given->open];
        Target *target = &all->targets[given->open];
        if (PyObject_GetBuffer(PyTuple_GetItem(given->buffers, given->open), view, PyBUF_STRIDES)) return -1;
        given->open++;
        if (rows_of(view, &target->rows)) return -1;
        if (view->readonly && view->len) {
            PyErr_SetString(PyExc_BufferError, "a buffer is not writable");
            return -1;
        }
        if (all->check) {
            unsigned long before = PyLong_AsUnsignedLong(PyList_GetItem(crcs, given->open - 1));
            if (before == (unsigned long)-1 && PyErr_Occurred()) return -1;
            target->crc = ~(uint32_t)before;
        }
        target->left = (size_t)view->len;
    }
    return 0;
}

/* The targets of a column: each chunk, and what is behind it. */
static Target *column_targets(const Py_buffer *chunks, const Py_buffer *behind, const uint32_t *sums, Target *target) {
    Py_ssize_t count = chunks->shape[0], gap = behind->obj ? behind->len / count : 0;
    Py_buffer chunk = *chunks;
    chunk.ndim--;
    chunk.shape++;
    chunk.strides++;
    chunk.len /= count;
    for (Py_ssize_t k = 0; k < count; k++) {
        chunk.buf = (char *)chunks->buf + k * chunks->strides[0];
        if (rows_of(&chunk, &target->rows)) return NULL;
        target->left = (size_t)chunk.len;
        target++->crc = ~*sums++;
        if (!gap) continue;
        target->rows = (Rows){.row = (char *)behind->buf + k * gap, .run = gap, .left = 1};
        target->left = (size_t)gap;
        target++->crc = ~*sums++;
    }
    return target;
}

/* As `open_targets`, for columns of chunks that the file has one behind the other; see `ChunkBuffers` in storage/strided.py.
Python made two objects for each chunk, and threads waited for the GIL meanwhile. */
static int open_columns(Given *given, PyObject *columns, PyObject *crcs) {
    memset(given, 0, sizeof *given);
    given->crcs = Py_None;
    if (!(given->buffers = PySequence_Tuple(columns))) return -1;
    Py_ssize_t number = PyTuple_Size(given->buffers), count = 0;
    Py_buffer *views = given->views = PyMem_Calloc(2 * (size_t)number + 1, sizeof(Py_buffer));
    Targets *all = given->all = PyMem_Calloc(1, sizeof(Targets));
    if (!views || !all) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t k = 0; k < number; k++) {
        PyObject *chunks, *behind;
        Py_buffer *view = &views[given->open];
        if (!PyArg_ParseTuple(PyTuple_GetItem(given->buffers, k), "OO", &chunks, &behind)) return -1;
        if (PyObject_GetBuffer(chunks, view, PyBUF_STRIDES | PyBUF_WRITABLE)) return -1;
        given->open++;
        if (behind != Py_None && PyObject_GetBuffer(behind, view + 1, PyBUF_WRITABLE)) return -1;
        given->open++;
        if (view->ndim < 2 || !view->len || (behind != Py_None && (!view[1].len || view[1].len % view->shape[0]))) {
            PyErr_SetString(PyExc_ValueError, "a column has no chunks, or memory behind them that is not of all alike");
            return -1;
        }
        count += view->shape[0] * (behind != Py_None ? 2 : 1);
    }
    if (PyObject_GetBuffer(crcs, &views[given->open], PyBUF_WRITABLE)) return -1;
    given->sums = views[given->open].buf;
    if (views[given->open++].len != 4 * count) {
        PyErr_SetString(PyExc_ValueError, "crcs has not 32 bits for each buffer");
        return -1;
    }
    if (!(all->targets = PyMem_Calloc((size_t)count + 1, sizeof(Target)))) {
        PyErr_NoMemory();
        return -1;
    }
    all->count = count;
    all->check = 1;
    Target *target = all->targets;
    for (Py_ssize_t k = 0; k < number; k++)
        if (!(target = column_targets(&views[2 * k], &views[2 * k + 1], given->sums + (target - all->targets), target))) return -1;
    return 0;
}

static int open_given(Given *given, PyObject *buffers, PyObject *crcs) {
    return (crcs == Py_None || PyList_Check(crcs) ? open_targets : open_columns)(given, buffers, crcs);
}

/* Puts the checksums where they were. */
static int set_crcs(const Given *given) {
    for (Py_ssize_t k = 0; given->sums && k < given->all->count; k++) given->sums[k] = ~given->all->targets[k].crc;
    for (Py_ssize_t k = 0; given->crcs != Py_None && k < given->all->count; k++) {
        PyObject *crc = PyLong_FromUnsignedLong(~given->all->targets[k].crc & 0xffffffff);
        if (!crc || PyList_SetItem(given->crcs, k, crc)) return -1;
    }
    return 0;
}

static void close_targets(Given *given) {
    while (given->open > 0) PyBuffer_Release(&given->views[--given->open]);
    PyMem_Free(given->views);
    if (given->all) {
        give_scratch(given->all->scratch);
        PyMem_Free(given->all->targets);
    }
    PyMem_Free(given->all);
    Py_XDECREF(given->buffers);
}

static PyObject *read_into(PyObject *module, PyObject *args) {
    int fd;
    long long offset;
    PyObject *buffers, *crcs = Py_None, *result = NULL;
    Given given;
    (void)module;
    if (!PyArg_ParseTuple(args, "iLO|O", &fd, &offset, &buffers, &crcs)) return NULL;
    if (open_given(&given, buffers, crcs)) goto end;
    Py_ssize_t done;
    Py_BEGIN_ALLOW_THREADS
    done = read_all(fd, (off_t)offset, given.all);
    Py_END_ALLOW_THREADS
    if (done < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
    } else if (!set_crcs(&given)) {
        result = PyLong_FromSsize_t(done);
    }
end:
    close_targets(&given);
    return result;
}

static PyObject *write_all(PyObject *module, PyObject *args) {
    int fd;
    Py_buffer data;
    ssize_t done = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "iy*", &fd, &data)) return NULL;
    const char *from = data.buf, *end = from + data.len;
    Py_BEGIN_ALLOW_THREADS
    /* Calls end at multiples of a piece: the page cache then has large folios, which are read up to twice as fast. */
    off_t at = lseek(fd, 0, SEEK_CUR);
    for (size_t n, room = PIECE - (at > 0 ? (size_t)at % PIECE : 0); from < end; room = room ? room : PIECE) {
        n = (size_t)(end - from);
        done = write(fd, from, n < room ? n : room);
        if (done >= 0) {
            from += done;
            room -= (size_t)done;
        }
        else if (errno != EINTR) break;
    }
    Py_END_ALLOW_THREADS
    if (from < end) PyErr_SetFromErrno(PyExc_OSError);
    PyBuffer_Release(&data);
    if (from < end) return NULL;
    Py_RETURN_NONE;
}

static PyObject *fill(PyObject *module, PyObject *args) {
    PyObject *buffers, *crcs = Py_None, *result = NULL;
    Py_buffer data;
    Given given;
    (void)module;
    if (!PyArg_ParseTuple(args, "Oy*|O", &buffers, &data, &crcs)) return NULL;
    if (open_given(&given, buffers, crcs)) goto end;
    size_t total = 0;
    for (Py_ssize_t k = 0; k < given.all->count; k++) total += given.all->targets[k].left;
    if (total > (size_t)data.len) {
        PyErr_SetString(PyExc_ValueError, "the buffers are larger than the data");
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    for (size_t at = 0; at < total; at += PIECE)
        scatter(given.all, (const char *)data.buf + at, total - at < PIECE ? total - at : PIECE);
    _mm_sfence();
    Py_END_ALLOW_THREADS
    if (!set_crcs(&given)) {
        Py_INCREF(Py_None);
        result = Py_None;
    }
end:
    close_targets(&given);
    PyBuffer_Release(&data);
    return result;
}

/* Copies rows to rows of another length. Short rows of the source are fetched in advance: each may be on another page. */
static void copy_all(Rows *to, Rows *from) {
    Py_ssize_t used = 0, taken = 0, ahead = 0;
    if (from->dims && from->run < PAGE) ahead = FETCHED * from->strides[from->dims - 1];
    while (to->left && from->left) {
        Py_ssize_t n = to->run - used < from->run - taken ? to->run - used : from->run - taken;
        const char *source = from->row + taken;
        for (Py_ssize_t k = 0; ahead && k < n; k += 64) __builtin_prefetch((char *)((uintptr_t)source + (uintptr_t)(ahead + k)));
        memcpy(to->row + used, source, (size_t)n);
        used += n;
        taken += n;
        if (used == to->run) {
            used = 0;
            next_row(to);
        }
        if (taken == from->run) {
            taken = 0;
            next_row(from);
        }
    }
}

static PyObject *copy(PyObject *module, PyObject *args) {
    PyObject *given[2], *result = NULL;
    Py_buffer views[2];
    Rows *rows = NULL;
    int open = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &given[0], &given[1])) return NULL;
    for (; open < 2; open++)
        if (PyObject_GetBuffer(given[open], &views[open], PyBUF_STRIDES | (open ? 0 : PyBUF_WRITABLE))) goto end;
    if (!(rows = PyMem_Malloc(2 * sizeof(Rows)))) {
        PyErr_NoMemory();
    } else if (views[0].len != views[1].len) {
        PyErr_SetString(PyExc_ValueError, "the buffers have different sizes");
    } else if (!rows_of(&views[0], &rows[0]) && !rows_of(&views[1], &rows[1])) {
        Py_BEGIN_ALLOW_THREADS
        copy_all(&rows[0], &rows[1]);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
end:
    PyMem_Free(rows);
    while (open) PyBuffer_Release(&views[--open]);
    return result;
}

PyObject *interpret(PyObject *module, PyObject *args); /* _native_pickle.c */
PyObject *pack(PyObject *module, PyObject *args); /* _native_pack.c */
PyObject *fingerprint(PyObject *module, PyObject *args); /* _native_fingerprint.c */
void prepare_fingerprints(void);
PyObject *seal(PyObject *module, PyObject *args); /* _native_chunks.c */
void prepare_chunks(void);

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, "copy(target, source): copy the bytes of a buffer into another one of as many bytes."},
    {"crc32c", crc32c, METH_VARARGS, "crc32c(buffer, value=0): the CRC-32C of a buffer, continued from `value`."},
    {"crc32", crc32, METH_VARARGS, "crc32(buffer, value=0): the CRC-32 of a buffer, as in zip files, continued from `value`."},
    {"crc32c_each", crc32c_each, METH_VARARGS, "crc32c_each(items, nbytes, value): the CRC-32C of each item of so many bytes, continued from `value`."},
    {"fill", fill, METH_VARARGS, "fill(buffers, data, crcs=None): copy bytes into buffers, or columns, past the cache, and continue a CRC-32C with each."},
    {"fingerprint", fingerprint, METH_VARARGS, "fingerprint(words, steps, first): the two sums of a buffer of words; see geometry/fingerprint.py."},
    {"interpret", interpret, METH_VARARGS, "interpret(data, meaning, calls, damaged): the value of a pickle; see sources/pickle/unpickler.py."},
    {"pack", pack, METH_VARARGS, "pack(target, file, begin, elements, starts, places, sums): tiles with their checksums; see format/packing.py."},
    {"read_into", read_into, METH_VARARGS, "read_into(fd, offset, buffers, crcs=None): fill buffers, or columns, and continue a CRC-32C with each; returns the bytes read."},
    {"seal", seal, METH_VARARGS, "seal(chunks, pitch): put the CRC-32C of each chunk behind it; returns the XXH3-128 of each."},
    {"write_all", write_all, METH_VARARGS, "write_all(fd, data): write all of a buffer to a file, 256 KiB at a time."},
    {NULL, NULL, 0, NULL}};

static int ready(PyObject *module) {
    (void)module;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul")) {
        PyErr_SetString(PyExc_ImportError, "this processor has no instructions for CRCs");
        return -1;
    }
    crc_bytes = crc_sse;
    crc_stream = crc_stream_sse;
    stream = stream_sse;
    if (__builtin_cpu_supports("avx2")) stream = stream_avx2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq")) {
        crc_bytes = crc_avx2;
        crc_stream = crc_stream_avx2;
    }
    if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("vpclmulqdq")) {
        crc_bytes = crc_avx512;
        crc_stream = crc_stream_avx512;
        stream = stream_avx512;
    }
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320 : 0);
        zip_table[byte] = crc;
    }
    prepare_fingerprints();
    prepare_chunks();
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, ready}, {0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
