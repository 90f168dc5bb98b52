// Numbers of every dtype, as they are stored and as they are computed with, for a GPU and for a host compiler.
//
// A GPU's compiler takes this for CUDA C++; any other for C++, where the tests run each thread of a launch after the
// other. It needs no headers, because those of half precision are not there on every machine: half precision is rounded
// here, bit for bit as numpy and ml_dtypes do it (a NaN is a NaN: its payload is as it happens).

#ifdef __CUDACC__

#define INNER __device__ __forceinline__
#if __CUDA_ARCH__ >= 700
#define GRID_CONSTANT __grid_constant__
#else
#define GRID_CONSTANT
#endif
#define LAUNCH_BOUNDS __launch_bounds__

INNER float root(float number) { return __fsqrt_rn(number); }
INNER double root(double number) { return __dsqrt_rn(number); }
INNER float magnitude_of(float number) { return fabsf(number); }
INNER double magnitude_of(double number) { return fabs(number); }

#else

#define INNER inline
#define GRID_CONSTANT
#define LAUNCH_BOUNDS(threads, blocks)
#define __global__

struct Place { unsigned int x; };
static Place blockIdx, blockDim, gridDim;
// Whoever looks on sees which thread it is, and how often it has waited for those of its block.
static volatile Place threadIdx;
static volatile unsigned int phase;
struct alignas(16) uint4 { unsigned int x, y, z, w; };

INNER float root(float number) { return __builtin_sqrtf(number); }
INNER double root(double number) { return __builtin_sqrt(number); }
INNER float magnitude_of(float number) { return __builtin_fabsf(number); }
INNER double magnitude_of(double number) { return __builtin_fabs(number); }

#endif

typedef unsigned int word32;
typedef unsigned long long word64;

union Bits32 { float number; word32 word; };
union Bits64 { double number; word64 word; };

INNER word32 bits_of(float number) { Bits32 bits; bits.number = number; return bits.word; }
INNER float single_of(word32 word) { Bits32 bits; bits.word = word; return bits.number; }
INNER word64 bits_of(double number) { Bits64 bits; bits.number = number; return bits.word; }
INNER double double_of(word64 word) { Bits64 bits; bits.word = word; return bits.number; }

// --- Half precision. To nearest, ties to even.

INNER float widened_float16(unsigned short half) {
    const word32 sign = (half & 0x8000u) << 16, magnitude = half & 0x7FFFu;
    if (magnitude < 0x0400u)  // a multiple of the smallest, which an integer counts exactly
        return single_of(sign | bits_of((float)magnitude * 5.9604644775390625e-08f));
    return single_of(sign | ((magnitude << 13) + (magnitude < 0x7C00u ? 112u << 23 : 0x7F800000u - (0x7C00u << 13))));
}

INNER unsigned short float16_of(float number) {
    const word32 word = bits_of(number), magnitude = word & 0x7FFFFFFFu, sign = word >> 16 & 0x8000u;
    if (magnitude > 0x7F800000u) return sign | 0x7E00u;
    if (magnitude >= 0x477FF000u) return sign | 0x7C00u;  // 65520 and more
    if (magnitude < 0x38800000u)  // below 2^-14: the last place of a sum with 0.5 is that of the smallest float16
        return sign | (bits_of(single_of(magnitude) + 0.5f) - 0x3F000000u);
    return sign | ((magnitude + 0xFFFu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13);
}

INNER unsigned short float16_of(double number) {
    const word64 word = bits_of(number), magnitude = word & 0x7FFFFFFFFFFFFFFFull;
    const word32 sign = (word32)(word >> 48) & 0x8000u;
    if (magnitude > 0x7FF0000000000000ull) return sign | 0x7E00u;
    if (magnitude >= 0x40EFFE0000000000ull) return sign | 0x7C00u;
    if (magnitude < 0x3F10000000000000ull)  // the same of a sum with 2^28
        return sign | (word32)(bits_of(double_of(magnitude) + 268435456.0) - 0x41B0000000000000ull);
    return sign | (word32)((magnitude + 0x1FFFFFFFFFFull + (magnitude >> 42 & 1ull) - (1008ull << 52)) >> 42);
}

INNER float widened_bfloat16(unsigned short half) { return single_of((word32)half << 16); }

INNER unsigned short bfloat16_of(float number) {
    const word32 word = bits_of(number);
    if ((word & 0x7FFFFFFFu) > 0x7F800000u) return word >> 16 | 0x40u;
    return (word + 0x7FFFu + (word >> 16 & 1u)) >> 16;
}

// --- Kinds: a dtype each, `name_kind` for numpy's name.
//
// `stored` is how a number lies in memory, `computed` what it is computed in; `widen` and `narrow` lead from one to the
// other. `narrow` takes any number: that is a cast.

template <class Real> struct Complex { Real real, imaginary; };

template <class Number> struct Plain {
    typedef Number stored;
    typedef Number computed;
    static INNER computed widen(stored number) { return number; }
    template <class Other> static INNER stored narrow(Other number) { return (stored)number; }
    template <class Real> static INNER stored narrow(Complex<Real> number) { return (stored)number.real; }
};

typedef Plain<signed char> int8_kind;
typedef Plain<short> int16_kind;
typedef Plain<int> int32_kind;
typedef Plain<long long> int64_kind;
typedef Plain<unsigned char> uint8_kind;
typedef Plain<unsigned short> uint16_kind;
typedef Plain<word32> uint32_kind;
typedef Plain<word64> uint64_kind;
typedef Plain<float> float32_kind;
typedef Plain<double> float64_kind;

struct bool_kind {
    typedef unsigned char stored;
    typedef int computed;
    static INNER computed widen(stored number) { return number != 0; }
    template <class Other> static INNER stored narrow(Other number) { return number != 0; }
    template <class Real> static INNER stored narrow(Complex<Real> number) {
        return number.real != 0 || number.imaginary != 0;
    }
};

struct float16_kind {
    typedef unsigned short stored;
    typedef float computed;
    static INNER computed widen(stored number) { return widened_float16(number); }
    static INNER stored narrow(double number) { return float16_of(number); }
    template <class Other> static INNER stored narrow(Other number) { return float16_of((float)number); }
    template <class Real> static INNER stored narrow(Complex<Real> number) { return float16_of(number.real); }
};

struct bfloat16_kind {
    typedef unsigned short stored;
    typedef float computed;
    static INNER computed widen(stored number) { return widened_bfloat16(number); }
    template <class Other> static INNER stored narrow(Other number) { return bfloat16_of((float)number); }
    template <class Real> static INNER stored narrow(Complex<Real> number) { return bfloat16_of((float)number.real); }
};

template <class Part> struct ComplexKind {
    typedef Complex<Part> stored;
    typedef Complex<Part> computed;
    static INNER computed widen(stored number) { return number; }
    template <class Other> static INNER stored narrow(Other number) {
        stored complex = {(Part)number, 0};
        return complex;
    }
    template <class Real> static INNER stored narrow(Complex<Real> number) {
        stored complex = {(Part)number.real, (Part)number.imaginary};
        return complex;
    }
};

typedef ComplexKind<float> complex64_kind;
typedef ComplexKind<double> complex128_kind;

// --- Parts of launches

// Return which of several ranges this number lies in: the first that ends behind it.
INNER int range_of(const long long* ends, long long count, long long number) {
    int low = 0, high = (int)count - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (ends[middle] > number)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// --- Numbers at a time
//
// A GPU moves 16 bytes at once, where they begin at a multiple of 16. So a thread has four numbers side by side, of four
// bytes each. Where arrays do not begin so, its four numbers are as far apart as a block has threads: then threads side
// by side have neighbours. Either way it loads all that it needs before it stores: a load may not pass a store, and memory
// is busy only while many are on their way.

enum { GROUP = 4 };

template <class T> struct alignas(GROUP * sizeof(T) < 16 ? GROUP * sizeof(T) : 16) Group { T number[GROUP]; };

template <class T> INNER bool is_aligned(const T* numbers) { return (word64)numbers % alignof(Group<T>) == 0; }

// Where the numbers of a thread are, counted from where the arrays of its block begin.
struct Places {
    int first, apart, end;
    bool at_once;  // all four, in every array

    INNER int operator()(int k) const { return first + k * apart; }
    INNER bool has(int k) const { return (*this)(k) < end; }
};

// Return the places of a group that has so many numbers, side by side.
INNER Places group_of(int first, int count, bool aligned) {
    const Places places = {first, 1, first + count, aligned && count >= GROUP};
    return places;
}

// What is not there is zero.
template <class T> INNER Group<T> read(const T* source, const Places& places) {
    if (places.at_once) return *(const Group<T>*)(source + places.first);
    Group<T> group = {};
    for (int k = 0; k < GROUP; k++)
        if (places.has(k)) group.number[k] = source[places(k)];
    return group;
}

template <class T> INNER void write(const Group<T>& group, T* target, const Places& places) {
    if (places.at_once) {
        *(Group<T>*)(target + places.first) = group;
        return;
    }
    for (int k = 0; k < GROUP; k++)
        if (places.has(k)) target[places(k)] = group.number[k];
}

// Have the threads of a block visit so many numbers, of arrays that are all aligned, or not.
template <class Visit> INNER void each_group(int count, bool aligned, const Visit& visit) {
    const int apart = aligned ? 1 : (int)blockDim.x, each = aligned ? GROUP : 1;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += GROUP * (int)blockDim.x) {
        const int first = begin + each * (int)threadIdx.x;
        const Places places = {first, apart, count, aligned && first + GROUP <= count};
        if (first < count) visit(places);
    }
}

// --- Parts of rules, by the names in records (mpikv/optimizers/recording.py). A NaN stays.

template <class T> INNER T clipped(T number, T low, T high) {  // of two equal zeros the number
    const T raised = number < low || low != low ? low : number;
    return raised > high || high != high ? high : raised;
}

template <class T> INNER T larger(T left, T right) {  // of two equal zeros the right one
    return left <= right || right != right ? right : left;
}

template <class T> INNER T smaller(T left, T right) { return left >= right || right != right ? right : left; }

template <class T> INNER T sign_of(T number) {  // which makes zero positive
    return number > 0 ? (T)1 : number < 0 ? (T)-1 : number == 0 ? (T)0 : number;
}
