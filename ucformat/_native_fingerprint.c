/* Fingerprints: the words of a tensor's elements, each times a key of its place, added up in two lanes.

docs/spec/format.md defines them; `geometry/fingerprint.py` does the same in Python where this file was not built.
A key is a word of a table, by the place within a block, times a number of the block: what a block adds up to is
multiplied by the latter once. */

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define MAX_DIMS 64
#define LANES 2
#define BLOCK 1024 /* words; each has the same keys, but for the number of the block */

static uint64_t table[LANES][BLOCK]; /* odd numbers below 2^32, as wide as the products */

static uint64_t splitmix64(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

/* Multiplies words side by side, of which the first is number `begin` of a block, by the keys of the table, and adds up
as many as go into whole vectors; returns how many. */
typedef size_t (*AddVectors)(const char *words, size_t begin, size_t count, uint64_t sums[LANES]);

/* Four words at once in each lane, or eight; with two sums each, since an addition waits for the one before it. */
#define KEYS256(l, k) _mm256_loadu_si256((const __m256i *)&table[l][begin + (k)])
#define ADD256(name, Word, LOAD)                                                                    \
    __attribute__((target("avx2"))) static size_t name(                                             \
        const char *words, size_t begin, size_t count, uint64_t sums[LANES]) {                      \
        const Word *p = (const Word *)words;                                                        \
        size_t k = 0;                                                                               \
        __m256i even[LANES] = {_mm256_setzero_si256(), _mm256_setzero_si256()};                     \
        __m256i odd[LANES] = {_mm256_setzero_si256(), _mm256_setzero_si256()};                      \
        for (; k + 8 <= count; k += 8) {                                                            \
            __m256i x = LOAD(p + k), y = LOAD(p + k + 4);                                           \
            for (int l = 0; l < LANES; l++) {                                                       \
                even[l] = _mm256_add_epi64(even[l], _mm256_mul_epu32(x, KEYS256(l, k)));            \
                odd[l] = _mm256_add_epi64(odd[l], _mm256_mul_epu32(y, KEYS256(l, k + 4)));          \
            }                                                                                       \
        }                                                                                           \
        for (int l = 0; l < LANES; l++) {                                                           \
            uint64_t parts[4];                                                                      \
            _mm256_storeu_si256((__m256i *)parts, _mm256_add_epi64(even[l], odd[l]));               \
            sums[l] += parts[0] + parts[1] + parts[2] + parts[3];                                   \
        }                                                                                           \
        return k;                                                                                   \
    }

#define KEYS512(l, k) _mm512_loadu_si512(&table[l][begin + (k)])
#define ADD512(name, Word, LOAD)                                                                    \
    __attribute__((target("avx512f"))) static size_t name(                                          \
        const char *words, size_t begin, size_t count, uint64_t sums[LANES]) {                      \
        const Word *p = (const Word *)words;                                                        \
        size_t k = 0;                                                                               \
        __m512i even[LANES] = {_mm512_setzero_si512(), _mm512_setzero_si512()};                     \
        __m512i odd[LANES] = {_mm512_setzero_si512(), _mm512_setzero_si512()};                      \
        for (; k + 16 <= count; k += 16) {                                                          \
            __m512i x = LOAD(p + k), y = LOAD(p + k + 8);                                           \
            for (int l = 0; l < LANES; l++) {                                                       \
                even[l] = _mm512_add_epi64(even[l], _mm512_mul_epu32(x, KEYS512(l, k)));            \
                odd[l] = _mm512_add_epi64(odd[l], _mm512_mul_epu32(y, KEYS512(l, k + 8)));          \
            }                                                                                       \
        }                                                                                           \
        for (int l = 0; l < LANES; l++)                                                             \
            sums[l] += (uint64_t)_mm512_reduce_add_epi64(_mm512_add_epi64(even[l], odd[l]));        \
        return k;                                                                                   \
    }

#define FOUR_BYTES(p) _mm256_cvtepu8_epi64(_mm_loadu_si32(p))
#define FOUR_HALVES(p) _mm256_cvtepu16_epi64(_mm_loadl_epi64((const __m128i *)(p)))
#define FOUR_WORDS(p) _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)(p)))
#define EIGHT_BYTES(p) _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)(p)))
#define EIGHT_HALVES(p) _mm512_cvtepu16_epi64(_mm_loadu_si128((const __m128i *)(p)))
#define EIGHT_WORDS(p) _mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)(p)))

ADD256(add_bytes_avx2, uint8_t, FOUR_BYTES)
ADD256(add_halves_avx2, uint16_t, FOUR_HALVES)
ADD256(add_words_avx2, uint32_t, FOUR_WORDS)
ADD512(add_bytes_avx512, uint8_t, EIGHT_BYTES)
ADD512(add_halves_avx512, uint16_t, EIGHT_HALVES)
ADD512(add_words_avx512, uint32_t, EIGHT_WORDS)

static size_t add_none(const char *words, size_t begin, size_t count, uint64_t sums[LANES]) {
    (void)words, (void)begin, (void)count, (void)sums;
    return 0;
}

static AddVectors add_vectors[5]; /* by the bytes of a word */

void prepare_fingerprints(void) {
    for (uint64_t k = 0; k < BLOCK; k++)
        for (uint64_t l = 0; l < LANES; l++) table[l][k] = (splitmix64(-1 - LANES * k - l) & 0xffffffff) | 1;
    add_vectors[1] = add_vectors[2] = add_vectors[4] = add_none;
    if (__builtin_cpu_supports("avx2")) {
        add_vectors[1] = add_bytes_avx2;
        add_vectors[2] = add_halves_avx2;
        add_vectors[4] = add_words_avx2;
    }
    if (__builtin_cpu_supports("avx512f")) {
        add_vectors[1] = add_bytes_avx512;
        add_vectors[2] = add_halves_avx512;
        add_vectors[4] = add_words_avx512;
    }
}

static uint64_t word_at(const char *words, size_t nbytes) {
    uint64_t word = 0;
    memcpy(&word, words, nbytes);
    return word;
}

/* Adds words that lie side by side, in memory and in the tensor, there from place `at` on. */
void add_run(const char *words, size_t nbytes, uint64_t at, size_t count, uint64_t sums[LANES]) {
    while (count) {
        uint64_t block[LANES] = {0};
        size_t begin = at % BLOCK, n = count < BLOCK - begin ? count : BLOCK - begin;
        for (size_t k = add_vectors[nbytes](words, begin, n, block); k < n; k++)
            for (int l = 0; l < LANES; l++) block[l] += table[l][begin + k] * word_at(words + k * nbytes, nbytes);
        for (int l = 0; l < LANES; l++) sums[l] += block[l] * (splitmix64(at / BLOCK * LANES + (unsigned)l) | 1);
        words += n * nbytes;
        at += n;
        count -= n;
    }
}

/* A dim of the buffer: how far apart its words are in memory, in bytes, and in the tensor. */
typedef struct {
    Py_ssize_t size, stride;
    uint64_t step;
} Dim;

/* Dims that do not continue each other, around runs of words side by side. */
typedef struct {
    Dim dims[MAX_DIMS];
    int count;
    size_t run, nbytes; /* words of a run, bytes of a word */
} Words;

static void add_dims(const Words *all, int d, const char *words, uint64_t at, uint64_t sums[LANES]) {
    if (d == all->count) {
        add_run(words, all->nbytes, at, all->run, sums);
        return;
    }
    const Dim *dim = &all->dims[d];
    for (Py_ssize_t i = 0; i < dim->size; i++, words += dim->stride, at += dim->step) add_dims(all, d + 1, words, at, sums);
}

static int read_dims(const Py_buffer *view, PyObject *steps, Words *all) {
    if (view->ndim > MAX_DIMS || PyTuple_Size(steps) != view->ndim) {
        PyErr_SetString(PyExc_ValueError, "the steps are not those of the buffer's dims");
        return -1;
    }
    all->count = 0;
    for (int d = 0; d < view->ndim; d++) {
        uint64_t step = PyLong_AsUnsignedLongLong(PyTuple_GetItem(steps, d));
        if (PyErr_Occurred()) return -1;
        if (view->shape[d] != 1) all->dims[all->count++] = (Dim){view->shape[d], view->strides[d], step};
    }
    all->nbytes = (size_t)view->itemsize;
    all->run = 1;
    for (; all->count; all->count--) {
        const Dim *last = &all->dims[all->count - 1];
        if (last->stride != (Py_ssize_t)(all->run * all->nbytes) || last->step != all->run) break;
        all->run *= (size_t)last->size;
    }
    return 0;
}

PyObject *fingerprint(PyObject *module, PyObject *args) {
    PyObject *buffer, *steps, *result = NULL;
    unsigned long long first;
    Py_buffer view;
    Words all;
    uint64_t sums[LANES] = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!K", &buffer, &PyTuple_Type, &steps, &first)) return NULL;
    if (PyObject_GetBuffer(buffer, &view, PyBUF_STRIDES)) return NULL;
    if (view.itemsize != 1 && view.itemsize != 2 && view.itemsize != 4) {
        PyErr_SetString(PyExc_ValueError, "a word has 1, 2 or 4 bytes");
    } else if (!read_dims(&view, steps, &all)) {
        if (view.len) {
            Py_BEGIN_ALLOW_THREADS
            add_dims(&all, 0, view.buf, first, sums);
            Py_END_ALLOW_THREADS
        }
        result = Py_BuildValue("KK", (unsigned long long)sums[0], (unsigned long long)sums[1]);
    }
    PyBuffer_Release(&view);
    return result;
}
