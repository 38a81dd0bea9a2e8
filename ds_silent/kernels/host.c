/* One pass over a gradient on the CPU: its squared norm, its sketch, and the checksum of bits.

   Compiled at first use by host.py. The same numbers as torch's operations in accumulator.py and checksums.py: the
   tables and the checksums to the bit, the squares up to rounding. */
#include <stdint.h>
#include <string.h>

#if !defined(ONE_CPU) && defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

enum { LANES = 64, BLOCK = 8192, TOGETHER = 4, FP32 = 0, BF16 = 1, NONE = 2 };

INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float at(const void *values, int type, int64_t i) {
    return type == FP32 ? ((const float *)values)[i] : from_bits((uint32_t)((const uint16_t *)values)[i] << 16);
}

INLINE float with_sign(float value, int8_t sign) {
    return from_bits(bits_of(value) ^ ((uint32_t)(int32_t)sign & 0x80000000u));
}

/* To the nearest bf16, ties to even. A NaN keeps a bit of its own. */
INLINE float rounded_to_bf16(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    return from_bits(value != value ? bits | 0x00400000u : rounded);
}

INLINE float sum_at(const void *values, int type, const void *previous, int previous_type, int64_t i) {
    if (previous_type == NONE) return at(values, type, i);
    float sum = at(previous, previous_type, i) + at(values, type, i);
    return previous_type == BF16 ? rounded_to_bf16(sum) : sum;
}

/* What lies in the same columns of some rows of the sketch: a table's element is read and written once for all. */
INLINE double run(const void *values, int type, const void *previous, int previous_type, int64_t begin, int64_t width,
                  int rows, int64_t count, float *restrict table, const int8_t *restrict signs, int64_t shift,
                  float weight, int squared) {
    double square = 0.0;
    int64_t i = 0;
    for (int64_t block = 0; block + LANES <= count; block = i) {
        int64_t end = block + BLOCK < count ? block + BLOCK : count;
        float squares[LANES] = {0.0f};
        for (i = block; i + LANES <= end; i += LANES) {
            float total[LANES];
            for (int lane = 0; table && lane < LANES; lane++) total[lane] = table[i + lane];
            for (int row = 0; row < rows; row++)
                for (int lane = 0; lane < LANES; lane++) {
                    float value = sum_at(values, type, previous, previous_type, begin + row * width + i + lane);
                    if (table) total[lane] += weight * with_sign(value, signs[row * shift + i + lane]);
                    if (squared) squares[lane] += value * value;
                }
            for (int lane = 0; table && lane < LANES; lane++) table[i + lane] = total[lane];
        }
        for (int lane = 0; lane < LANES; lane++) square += squares[lane];
    }
    for (; i < count; i++)
        for (int row = 0; row < rows; row++) {
            float value = sum_at(values, type, previous, previous_type, begin + row * width + i);
            if (table) table[i] += weight * with_sign(value, signs[row * shift + i]);
            if (squared) square += (double)value * value;
        }
    return square;
}

INLINE double read(const void *values, int type, const void *previous, int previous_type, int64_t count, int64_t offset,
                   float *table, const int8_t *signs, int64_t width, int64_t shift, int64_t shifts, float weight,
                   int squared) {
    double square = 0.0;
    for (int64_t done = 0; done < count;) {
        int64_t row = (offset + done) / width, column = (offset + done) % width, left = count - done;
        int64_t length = width - column < left ? width - column : left;
        const int8_t *own = signs + shift * (row % shifts) + column;
        float *to = table ? table + column : 0;
        if (column == 0 && left >= TOGETHER * width && row % shifts + TOGETHER <= shifts) {
            square += run(values, type, previous, previous_type, done, width, TOGETHER, width, to, own, shift, weight,
                          squared);
            done += TOGETHER * width;
        } else {
            square += run(values, type, previous, previous_type, done, width, 1, length, to, own, shift, weight,
                          squared);
            done += length;
        }
    }
    return square;
}

#define READER(name, type, previous_type)                                                                              \
    FOR_EACH_CPU void name(const void *values, const void *previous, int64_t count, int64_t offset, float *table,      \
                           const int8_t *signs, int64_t width, int64_t shift, int64_t shifts, float weight,             \
                           float *square) {                                                                            \
        double found = read(values, type, previous, previous_type, count, offset, table, signs, width, shift, shifts,  \
                            weight, square != 0);                                                                      \
        if (square) *square = (float)found;                                                                            \
    }

READER(read_fp32, FP32, NONE)
READER(read_bf16, BF16, NONE)
READER(read_fp32_onto_fp32, FP32, FP32)
READER(read_bf16_onto_fp32, BF16, FP32)
READER(read_bf16_onto_bf16, BF16, BF16)
READER(read_fp32_onto_bf16, FP32, BF16)

/* What was written to since the last time, folded and zero again: element i goes to bucket i % size. Bit b of a table's
   byte says that its elements from b * size on were written to, size of them. */
FOR_EACH_CPU void fold(int64_t tables, uint8_t *touched, float *table, int64_t length, int64_t size, float *sketch) {
    for (; tables > 0; tables--, touched++, table += length, sketch += size) {
        int first = 1;
        if (!*touched) memset(sketch, 0, (size_t)size * sizeof(float));
        for (int block = 0; *touched >> block; block++) {
            if (!(*touched >> block & 1)) continue;
            float *from = table + block * size;
            for (int64_t i = 0; i < size; i++) {
                sketch[i] = first ? from[i] : sketch[i] + from[i];
                from[i] = 0.0f;
            }
            first = 0;
        }
        *touched = 0;
    }
}

/* Each tensor's 64-bit words, a row of them at a time, times their keys; the last bytes count as a word of their own. */
FOR_EACH_CPU void checksums(int64_t tensors, const uint8_t *const *values, const int64_t *bytes, int64_t row,
                            const uint64_t *word_keys, const uint64_t *row_keys, uint64_t *found) {
    for (int64_t tensor = 0; tensor < tensors; tensor++) {
        const uint8_t *at = values[tensor];
        uint64_t total = 0, last = 0;
        if (at) {
            int64_t words = bytes[tensor] / 8;
            for (int64_t first = 0; first < words; first += row) {
                int64_t count = words - first < row ? words - first : row;
                uint64_t sum = 0;
                for (int64_t i = 0; i < count; i++) {
                    uint64_t word;
                    memcpy(&word, at + 8 * (first + i), 8);
                    sum += word * word_keys[i];
                }
                total += sum * row_keys[first / row];
            }
            memcpy(&last, at + 8 * words, (size_t)(bytes[tensor] % 8));
        }
        found[tensor] = total + last * row_keys[0];
    }
}
