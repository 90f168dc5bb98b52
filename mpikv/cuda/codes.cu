// The codecs of two bits and of one with error feedback (mpikv/codecs/bits.py): the same float32 operations on an
// element, in the same order, and the same bytes.

// What one launch is given, by value; mpikv/cuda/codes.py has the same. Decoding reads `payload` and adds to `numbers`.
struct Codes {
    const float* gradient;  // null where something is decoded
    float* numbers;         // the residual, or what is added to
    unsigned char* payload;
    long long size;   // of elements
    long long bytes;  // of the payload: whole words
    double threshold;
};

struct two_bits {
    static const int bits = 2;
    static INNER int code(float number, float threshold) {
        return number >= threshold ? 3 : number <= -threshold ? 2 : 0;
    }
    static INNER float decoded(int code, float threshold) { return code == 3 ? threshold : code == 2 ? -threshold : 0; }
};

struct one_bit {
    static const int bits = 1;
    static INNER int code(float number, float threshold) { return number > threshold; }
    static INNER float decoded(int code, float) { return code ? 1 : -1; }
};

// A thread has a byte at a time, and the elements in it, which lie side by side.
template <class Code> __global__ void encode(const GRID_CONSTANT Codes given) {
    const int each = 8 / Code::bits;
    const float threshold = (float)given.threshold;
    const long long stride = (long long)gridDim.x * blockDim.x;
#pragma unroll 1
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < given.bytes; i += stride) {
        int byte = 0;
        for (int place = 0; place < each; place++) {
            const long long at = i * each + place;
            int code = 0;
            if (at < given.size) {
                const float kept = given.numbers[at] + given.gradient[at];
                code = Code::code(kept, threshold);
                given.numbers[at] = kept - Code::decoded(code, threshold);
            }
            byte = byte << Code::bits | code;
        }
        given.payload[i] = (unsigned char)byte;
    }
}

// A thread has an element at a time.
template <class Code> __global__ void decode_add(const GRID_CONSTANT Codes given) {
    const int each = 8 / Code::bits;
    const float threshold = (float)given.threshold;
    const long long stride = (long long)gridDim.x * blockDim.x;
#pragma unroll 1
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < given.size; i += stride) {
        const int shift = 8 - Code::bits - (int)(i % each) * Code::bits;
        const int code = given.payload[i / each] >> shift & ((1 << Code::bits) - 1);
        given.numbers[i] = given.numbers[i] + Code::decoded(code, threshold);
    }
}
