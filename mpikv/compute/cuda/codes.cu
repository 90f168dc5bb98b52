// The codecs of ranges (mpikv/codecs/bits.py and casts.py), with error feedback and without: the same float32 operations
// on an element, in the same order, and the same bytes.

enum { PART = 1 << 12 };

// What one launch is given, by value; loading.py reads its fields here. Decoding reads `payload` and adds to `numbers`.
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

// What a thread has at a time: a unit and the elements in it, or as many units as have four elements.
template <class Code> struct Units {
    enum { in_one = 8 * (int)sizeof(typename Code::unit) / Code::bits, count = in_one < GROUP ? GROUP / in_one : 1 };
    enum { elements = (int)count * (int)in_one, groups = (int)elements / (int)GROUP };
};

// Have the threads of a block visit the elements of its part: `visit(first, units)` of the first of a thread's and the
// units of the payload that they are in.
template <class Code, class Visit> INNER void each_unit(const Codes& given, const Visit& visit) {
    typedef Units<Code> At;
    const long long units = given.bytes / (long long)sizeof(typename Code::unit);
    const long long begin = blockIdx.x * (long long)PART, left = units * At::in_one - begin;
    const int count = left < PART ? (int)left : (int)PART;
#pragma unroll 1
    for (int first = At::elements * (int)threadIdx.x; first < count; first += At::elements * (int)blockDim.x)
        visit(begin + first, count - first < At::elements ? (count - first) / At::in_one : (int)At::count);
}

// Return where the elements of a group are, counted from the first of the thread's, of which so many are there.
INNER Places elements_of(int group, long long inside, bool aligned) {
    const long long left = inside - GROUP * group;
    return group_of(GROUP * group, left < GROUP ? (int)left : (int)GROUP, aligned);
}

template <class Code> __global__ void encode(const GRID_CONSTANT Codes given) {
    typedef typename Code::unit unit;
    typedef Units<Code> At;
    const float threshold = (float)given.threshold;
    const bool aligned = is_aligned(given.gradient) && is_aligned(given.numbers);
    const bool in_groups = is_aligned((const unit*)given.payload);
    each_unit<Code>(given, [&](long long first, int units) {
        int codes[At::elements];
        for (int group = 0; group < At::groups; group++) {
            const Places places = elements_of(group, given.size - first, aligned);
            Group<float> kept = read(given.gradient + first, places), left;
            if (given.numbers) {
                left = read(given.numbers + first, places);
                for (int k = 0; k < GROUP; k++) kept.number[k] = left.number[k] + kept.number[k];
            }
            for (int k = 0; k < GROUP; k++) {
                const int code = places.has(k) ? Code::code(kept.number[k], threshold) : 0;
                // What the others read begins at zero, which makes a negative zero positive.
                left.number[k] = kept.number[k] - (0.0f + Code::decoded(code, threshold));
                codes[GROUP * group + k] = code;
            }
            if (given.numbers) write(left, given.numbers + first, places);
        }
        Group<unit> made = {};
        for (int i = 0; i < At::elements; i++)
            made.number[i / At::in_one] = (unit)(made.number[i / At::in_one] << Code::bits | codes[i]);
        write(made, (unit*)given.payload + first / At::in_one, group_of(0, units, in_groups));
    });
}

template <class Code> __global__ void decode_add(const GRID_CONSTANT Codes given) {
    typedef typename Code::unit unit;
    typedef Units<Code> At;
    const float threshold = (float)given.threshold;
    const bool aligned = is_aligned(given.numbers), in_groups = is_aligned((const unit*)given.payload);
    each_unit<Code>(given, [&](long long first, int units) {
        const Group<unit> payload = read((const unit*)given.payload + first / At::in_one, group_of(0, units, in_groups));
        for (int group = 0; group < At::groups; group++) {
            const Places places = elements_of(group, given.size - first, aligned);
            Group<float> sum = read(given.numbers + first, places);
            for (int k = 0; k < GROUP; k++) {
                const int i = GROUP * group + k, shift = Code::bits * (At::in_one - 1 - i % At::in_one);
                const int code = payload.number[i / At::in_one] >> shift & ((1 << Code::bits) - 1);
                sum.number[k] = sum.number[k] + Code::decoded(code, threshold);
            }
            write(sum, given.numbers + first, places);
        }
    });
}
