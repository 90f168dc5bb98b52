// Rows of arrays, by their numbers: taken, put, added, and summed where a number is given more than once.
//
// A row is cut into pieces that a thread moves at once. They belong to threads side by side, a power of two of them:
// narrow rows then leave few threads idle, and none of them divides. A thread has the same pieces of GROUP rows. An
// element is summed by one thread, in the order that the host has chosen.

// What one launch is given, by value; loading.py reads its fields here.
struct Rows {
    const char* source;  // null for zeros, where rows are put
    char* target;
    const long long* ids;
    const long long* starts;  // where runs of numbers begin, and where the last ends
    long long count;          // of rows, or of runs
    long long width;          // pieces of a row
    long long piece;          // the bytes of one, where rows are moved; its elements, GROUP or 1, where they are added
    long long shift;          // the pieces that a block has threads for: 1 << shift
};

struct Walk {
    long long first, apart, end, column, columns;

    INNER Walk(const Rows& given)
        : first(blockIdx.x * (long long)GROUP * (blockDim.x >> given.shift) + (threadIdx.x >> given.shift)),
          apart(blockDim.x >> given.shift),
          end(given.count),
          column(threadIdx.x & ((1u << given.shift) - 1u)),
          columns(1ll << given.shift) {}

    INNER long long row(int k) const { return first + k * apart; }
    INNER bool has(int k) const { return row(k) < end; }
};

// --- Moved

template <class Bits> INNER void take(const Rows& given) {
    const Walk walk(given);
    const Bits* from[GROUP];
    for (int k = 0; k < GROUP; k++)
        from[k] = (const Bits*)given.source + (walk.has(k) ? given.ids[walk.row(k)] * given.width : 0);
    Bits* to = (Bits*)given.target + walk.first * given.width;
#pragma unroll 1
    for (long long i = walk.column; i < given.width; i += walk.columns) {
        Bits bits[GROUP] = {};
        for (int k = 0; k < GROUP; k++)
            if (walk.has(k)) bits[k] = from[k][i];
        for (int k = 0; k < GROUP; k++)
            if (walk.has(k)) to[k * walk.apart * given.width + i] = bits[k];
    }
}

template <class Bits> INNER void put(const Rows& given) {
    const Walk walk(given);
    const Bits* from = (const Bits*)given.source + (given.source ? walk.first * given.width : 0);
    Bits* to[GROUP];
    for (int k = 0; k < GROUP; k++)
        to[k] = (Bits*)given.target + (walk.has(k) ? given.ids[walk.row(k)] * given.width : 0);
#pragma unroll 1
    for (long long i = walk.column; i < given.width; i += walk.columns) {
        Bits bits[GROUP] = {};
        for (int k = 0; k < GROUP; k++)
            if (walk.has(k) && given.source) bits[k] = from[k * walk.apart * given.width + i];
        for (int k = 0; k < GROUP; k++)
            if (walk.has(k)) to[k][i] = bits[k];
    }
}

// Rows of these numbers, one after the other.
__global__ void take_rows(const GRID_CONSTANT Rows given) {
    switch (given.piece) {
        case 16: return take<uint4>(given);
        case 8: return take<word64>(given);
        case 4: return take<word32>(given);
        case 2: return take<unsigned short>(given);
        default: return take<unsigned char>(given);
    }
}

// Rows, or zeros, to those of these numbers.
__global__ void put_rows(const GRID_CONSTANT Rows given) {
    switch (given.piece) {
        case 16: return put<uint4>(given);
        case 8: return put<word64>(given);
        case 4: return put<word32>(given);
        case 2: return put<unsigned short>(given);
        default: return put<unsigned char>(given);
    }
}

// --- Added

template <class Number> INNER Number added(Number left, Number right) { return left + right; }

// Integers wrap, which C++ says of those without a sign only.
INNER int added(int left, int right) { return (int)((word32)left + (word32)right); }
INNER long long added(long long left, long long right) { return (long long)((word64)left + (word64)right); }

template <class Real> INNER Complex<Real> added(Complex<Real> left, Complex<Real> right) {
    const Complex<Real> sum = {left.real + right.real, left.imaginary + right.imaginary};
    return sum;
}

// Return the elements of a piece. Those that it has not are zero.
INNER Places elements_of(const Rows& given) { return group_of(0, (int)given.piece, true); }

// Rows to those of these numbers, each of which is there once.
template <class From, class Sum> __global__ void add_rows(const GRID_CONSTANT Rows given) {
    const Walk walk(given);
    const Places places = elements_of(given);
    const long long width = given.width * given.piece;
#pragma unroll 1
    for (int each = 0; each < GROUP && walk.has(each); each++) {
        const typename From::stored* from = (const typename From::stored*)given.source + walk.row(each) * width;
        typename Sum::stored* to = (typename Sum::stored*)given.target + given.ids[walk.row(each)] * width;
        for (long long i = walk.column * given.piece; i < width; i += walk.columns * given.piece) {
            const Group<typename From::stored> rows = read(from + i, places);
            Group<typename Sum::stored> sum = read(to + i, places);
            for (int k = 0; k < GROUP; k++) {
                const typename Sum::computed more = From::widen(rows.number[k]);
                sum.number[k] = Sum::narrow(added(Sum::widen(sum.number[k]), more));
            }
            write(sum, to + i, places);
        }
    }
}

// The sum of the rows of each run of numbers, from the first to the last, rounded once.
template <class Term> __global__ void sum_runs(const GRID_CONSTANT Rows given) {
    typedef Group<typename Term::stored> Terms;
    const Walk walk(given);
    const Places places = elements_of(given);
    const long long width = given.width * given.piece;
    const typename Term::stored* source = (const typename Term::stored*)given.source;
#pragma unroll 1
    for (int each = 0; each < GROUP && walk.has(each); each++) {
        const long long begin = given.starts[walk.row(each)], end = given.starts[walk.row(each) + 1];
        typename Term::stored* to = (typename Term::stored*)given.target + walk.row(each) * width;
        for (long long i = walk.column * given.piece; i < width; i += walk.columns * given.piece) {
            Terms terms = read(source + given.ids[begin] * width + i, places);
            typename Term::computed sum[GROUP];
            for (int k = 0; k < GROUP; k++) sum[k] = Term::widen(terms.number[k]);
#pragma unroll 1  // most runs are of one row
            for (long long place = begin + 1; place < end; place++) {
                terms = read(source + given.ids[place] * width + i, places);
                for (int k = 0; k < GROUP; k++) sum[k] = added(sum[k], Term::widen(terms.number[k]));
            }
            for (int k = 0; k < GROUP; k++) terms.number[k] = Term::narrow(sum[k]);
            write(terms, to + i, places);
        }
    }
}
