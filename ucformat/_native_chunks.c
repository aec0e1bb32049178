/* Chunks in a row, each with room for its CRC-32C behind it: their checksums, and their digests (XXH3-128).

In Python, threads that write arrays waited for the GIL at every chunk. The algorithm is that of the specification of xxHash
for inputs of more than 240 bytes, with the default secret and no seed. */

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define CRC_BYTES 4
#define DIGEST_BYTES 16
#define SHORT 240 /* bytes of inputs that XXH3 digests in other ways */
#define STRIPE 64
#define STRIPES 16 /* of a block */
#define LANES 8    /* of a stripe, of eight bytes each */

static const uint8_t secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

static const uint64_t prime32[3] = {0x9e3779b1, 0x85ebca77, 0xc2b2ae3d};
static const uint64_t prime64[5] = {0x9e3779b185ebca87, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9, 0x85ebca77c2b2ae63,
                                    0x27d4eb2f165667c5};

static uint64_t word(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, 8);
    return value;
}

/* Adds stripes that follow each other to the lanes; each is mixed with the secret from eight bytes later on. */
typedef void (*AddStripes)(uint64_t lanes[LANES], const uint8_t *p, const uint8_t *with, size_t count);

static void add_stripes_plain(uint64_t lanes[LANES], const uint8_t *p, const uint8_t *with, size_t count) {
    for (; count; count--, p += STRIPE, with += 8)
        for (int k = 0; k < LANES; k++) {
            uint64_t value = word(p + 8 * k), key = value ^ word(with + 8 * k);
            lanes[k ^ 1] += value;
            lanes[k] += (uint32_t)key * (key >> 32);
        }
}

__attribute__((target("avx2"))) static void add_stripes_avx2(
    uint64_t lanes[LANES], const uint8_t *p, const uint8_t *with, size_t count) {
    __m256i sums[2];
    memcpy(sums, lanes, sizeof sums);
    for (; count; count--, p += STRIPE, with += 8)
        for (int k = 0; k < 2; k++) {
            __m256i value = _mm256_loadu_si256((const __m256i *)p + k);
            __m256i key = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)with + k));
            __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
            __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
            sums[k] = _mm256_add_epi64(sums[k], _mm256_add_epi64(product, swapped));
        }
    memcpy(lanes, sums, sizeof sums);
}

static AddStripes add_stripes;

static uint64_t merged(const uint64_t lanes[LANES], const uint8_t *with, uint64_t sum) {
    for (int k = 0; k < LANES; k += 2) {
        __uint128_t product = (__uint128_t)(lanes[k] ^ word(with + 8 * k)) * (lanes[k + 1] ^ word(with + 8 * k + 8));
        sum += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    sum = (sum ^ sum >> 37) * 0x165667919e3779f9;
    return sum ^ sum >> 32;
}

static void digest_of(const uint8_t *p, size_t n, uint8_t digest[DIGEST_BYTES]) {
    uint64_t lanes[LANES] = {prime32[2], prime64[0], prime64[1], prime64[2], prime64[3], prime32[1], prime64[4], prime32[0]};
    const uint8_t *last = secret + sizeof secret - STRIPE;
    size_t left = n - 1; /* a last byte at least is for the last stripe */
    for (; left >= STRIPE * STRIPES; left -= STRIPE * STRIPES, p += STRIPE * STRIPES) {
        add_stripes(lanes, p, secret, STRIPES);
        for (int k = 0; k < LANES; k++) lanes[k] = (lanes[k] ^ lanes[k] >> 47 ^ word(last + 8 * k)) * prime32[0];
    }
    add_stripes(lanes, p, secret, left / STRIPE);
    add_stripes(lanes, p + left + 1 - STRIPE, last - 7, 1);
    uint64_t low = merged(lanes, secret + 11, n * prime64[0]), high = merged(lanes, last - 11, ~(n * prime64[1]));
    low = __builtin_bswap64(low);
    high = __builtin_bswap64(high);
    memcpy(digest, &high, 8);
    memcpy(digest + 8, &low, 8);
}

void prepare_chunks(void) { add_stripes = __builtin_cpu_supports("avx2") ? add_stripes_avx2 : add_stripes_plain; }

uint32_t crc32c_bytes(uint32_t crc, const uint8_t *p, size_t n); /* _native.c */

PyObject *seal(PyObject *module, PyObject *args) {
    PyObject *buffer, *result = NULL;
    Py_buffer view;
    Py_ssize_t pitch;
    (void)module;
    if (!PyArg_ParseTuple(args, "On", &buffer, &pitch)) return NULL;
    if (PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE)) return NULL;
    if (pitch <= SHORT + CRC_BYTES || view.len % pitch) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are no chunks of more than %d, each with a checksum", view.len, SHORT);
    } else if ((result = PyBytes_FromStringAndSize(NULL, view.len / pitch * DIGEST_BYTES))) {
        uint8_t *digest = (uint8_t *)PyBytes_AsString(result), *end = (uint8_t *)view.buf + view.len;
        size_t nbytes = (size_t)pitch - CRC_BYTES;
        Py_BEGIN_ALLOW_THREADS
        for (uint8_t *chunk = view.buf; chunk < end; chunk += pitch, digest += DIGEST_BYTES) {
            digest_of(chunk, nbytes, digest);
            uint32_t crc = crc32c_bytes(0, chunk, nbytes);
            memcpy(chunk + nbytes, &crc, CRC_BYTES);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&view);
    return result;
}
