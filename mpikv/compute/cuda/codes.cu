// The codecs of ranges (mpikv/codecs/bits.py and casts.py), with error feedback and without: the same float32 operations
// on an element, in the same order, and the same bytes.

// What one launch is given, by value; mpikv/compute/cuda/codes.py has the same. Decoding reads `payload` and adds to `numbers`.
struct Codes {
    const float* gradient;  // null where something is decoded
    float* numbers;         // the residual, null where none is kept; or what is added to
    char* payload;
    long long size;   // of elements
    long long bytes;  // of the payload: whole units
    double threshold;
};

// A code has so many bits of a unit, in which the first element has the highest.

struct two_bits {
    typedef unsigned char unit;
    static const int bits = 2;
    static INNER int code(float number, float threshold) {
        return number >= threshold ? 3 : number <= -threshold ? 2 : 0;
    }
    static INNER float decoded(int code, float threshold) { return code == 3 ? threshold : code == 2 ? -threshold : 0; }
};

struct one_bit {
    typedef unsigned char unit;
    static const int bits = 1;
    static INNER int code(float number, float threshold) { return number > threshold; }
    static INNER float decoded(int code, float) { return code ? 1 : -1; }
};

struct float16_code {
    typedef unsigned short unit;
    static const int bits = 16;
    static INNER int code(float number, float) {
        return float16_of(number < -65504.0f ? -65504.0f : number > 65504.0f ? 65504.0f : number);
    }
    static INNER float decoded(int code, float) { return widened_float16((unsigned short)code); }
};

struct bfloat16_code {
    typedef unsigned short unit;
    static const int bits = 16;
    static INNER int code(float number, float) {
        const word32 word = bits_of(number);
        return (int)((word + 0x7FFFu + (word >> 16 & 1u)) >> 16);
    }
    static INNER float decoded(int code, float) { return widened_bfloat16((unsigned short)code); }
};

// Numbers that lie side by side, as a GPU reads and writes them at once. One by one, each would take a transaction.
struct alignas(16) Four {
    float number[4];
};

INNER bool is_aligned(const float* numbers) { return (word64)numbers % sizeof(Four) == 0; }

// Copy `count` numbers, where `inside` of them are in the array and the others are none: `count` of them, if `whole`.
template <int count> INNER void read(const float* source, float* numbers, long long inside, bool whole) {
    if (count % 4 == 0 && whole && is_aligned(source)) {
        for (int i = 0; i < count / 4; i++) {
            const Four four = ((const Four*)source)[i];
            for (int k = 0; k < 4; k++) numbers[4 * i + k] = four.number[k];
        }
    } else {
        for (int i = 0; i < count; i++) numbers[i] = i < inside ? source[i] : 0;
    }
}

template <int count> INNER void write(const float* numbers, float* target, long long inside, bool whole) {
    if (count % 4 == 0 && whole && is_aligned(target)) {
        for (int i = 0; i < count / 4; i++) {
            Four four;
            for (int k = 0; k < 4; k++) four.number[k] = numbers[4 * i + k];
            ((Four*)target)[i] = four;
        }
    } else {
        for (int i = 0; i < count; i++)
            if (i < inside) target[i] = numbers[i];
    }
}

// A thread has a unit at a time, and the elements in it, which lie side by side.
template <class Code> __global__ void encode(const GRID_CONSTANT Codes given) {
    typedef typename Code::unit unit;
    const int each = 8 * (int)sizeof(unit) / Code::bits;
    const long long units = given.bytes / (long long)sizeof(unit);
    const float threshold = (float)given.threshold;
    unit* payload = (unit*)given.payload;
    const long long stride = (long long)gridDim.x * blockDim.x;
#pragma unroll 1
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < units; i += stride) {
        const long long first = i * each, inside = given.size - first;
        const bool whole = inside >= each;
        float kept[each], left[each];
        read<each>(given.gradient + first, kept, inside, whole);
        if (given.numbers) {
            read<each>(given.numbers + first, left, inside, whole);
            for (int k = 0; k < each; k++) kept[k] = left[k] + kept[k];
        }
        int codes = 0;
        for (int k = 0; k < each; k++) {
            const int code = k < inside ? Code::code(kept[k], threshold) : 0;
            // What the others read begins at zero, which makes a negative zero positive.
            left[k] = kept[k] - (0.0f + Code::decoded(code, threshold));
            codes = codes << Code::bits | code;
        }
        if (given.numbers) write<each>(left, given.numbers + first, inside, whole);
        payload[i] = (unit)codes;
    }
}

// A thread has an element at a time.
template <class Code> __global__ void decode_add(const GRID_CONSTANT Codes given) {
    typedef typename Code::unit unit;
    const int width = 8 * (int)sizeof(unit), each = width / Code::bits;
    const float threshold = (float)given.threshold;
    const unit* payload = (const unit*)given.payload;
    const long long stride = (long long)gridDim.x * blockDim.x;
#pragma unroll 1
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < given.size; i += stride) {
        const int shift = width - Code::bits - (int)(i % each) * Code::bits;
        const int code = payload[i / each] >> shift & ((1 << Code::bits) - 1);
        given.numbers[i] = given.numbers[i] + Code::decoded(code, threshold);
    }
}
