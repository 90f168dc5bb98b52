// Rows of arrays, by their numbers: taken, put, added, and summed where a number is given more than once.
//
// The columns of a row belong to threads side by side, a power of two of them: narrow rows then leave few threads idle,
// and none of them divides. An element is summed by one thread, in the order that the host has chosen.

// What one launch is given, by value; mpikv/compute/cuda/rows.py has the same.
struct Rows {
    const char* source;  // null for zeros, where rows are put
    char* target;
    const long long* ids;
    const long long* starts;  // where runs of numbers begin, and where the last ends
    long long count;          // of rows, or of runs
    long long width;          // elements of a row
    long long shift;          // the columns that a block has threads for: 1 << shift
};

struct Walk {
    long long row, rows, column, columns;
};

INNER Walk walk_of(const Rows& given) {
    const long long at_once = blockDim.x >> given.shift;
    const Walk walk = {blockIdx.x * at_once + (threadIdx.x >> given.shift), gridDim.x * at_once,
                       threadIdx.x & ((1u << given.shift) - 1u), 1ll << given.shift};
    return walk;
}

template <class Number> INNER Number added(Number left, Number right) { return left + right; }

// Integers wrap, which C++ says of those without a sign only.
INNER int added(int left, int right) { return (int)((word32)left + (word32)right); }
INNER long long added(long long left, long long right) { return (long long)((word64)left + (word64)right); }

template <class Real> INNER Complex<Real> added(Complex<Real> left, Complex<Real> right) {
    const Complex<Real> sum = {left.real + right.real, left.imaginary + right.imaginary};
    return sum;
}

// Rows of these numbers, one after the other.
template <class Unit> __global__ void take_rows(const GRID_CONSTANT Rows given) {
    typedef typename Unit::stored Bits;
    const Walk walk = walk_of(given);
    for (long long row = walk.row; row < given.count; row += walk.rows) {
        const Bits* from = (const Bits*)given.source + given.ids[row] * given.width;
        Bits* to = (Bits*)given.target + row * given.width;
        for (long long i = walk.column; i < given.width; i += walk.columns) to[i] = from[i];
    }
}

// Rows, or zeros, to those of these numbers.
template <class Unit> __global__ void put_rows(const GRID_CONSTANT Rows given) {
    typedef typename Unit::stored Bits;
    const Walk walk = walk_of(given);
    for (long long row = walk.row; row < given.count; row += walk.rows) {
        const Bits* from = given.source ? (const Bits*)given.source + row * given.width : 0;
        Bits* to = (Bits*)given.target + given.ids[row] * given.width;
        for (long long i = walk.column; i < given.width; i += walk.columns) to[i] = from ? from[i] : (Bits)0;
    }
}

// Rows to those of these numbers, each of which is there once.
template <class From, class Sum> __global__ void add_rows(const GRID_CONSTANT Rows given) {
    const Walk walk = walk_of(given);
    for (long long row = walk.row; row < given.count; row += walk.rows) {
        const typename From::stored* from = (const typename From::stored*)given.source + row * given.width;
        typename Sum::stored* to = (typename Sum::stored*)given.target + given.ids[row] * given.width;
        for (long long i = walk.column; i < given.width; i += walk.columns) {
            const typename Sum::computed more = From::widen(from[i]);
            to[i] = Sum::narrow(added(Sum::widen(to[i]), more));
        }
    }
}

// The sum of the rows of each run of numbers, from the first to the last, rounded once.
template <class Term> __global__ void sum_runs(const GRID_CONSTANT Rows given) {
    const Walk walk = walk_of(given);
    const typename Term::stored* source = (const typename Term::stored*)given.source;
    for (long long run = walk.row; run < given.count; run += walk.rows) {
        const long long begin = given.starts[run], end = given.starts[run + 1];
        typename Term::stored* to = (typename Term::stored*)given.target + run * given.width;
        for (long long i = walk.column; i < given.width; i += walk.columns) {
            typename Term::computed sum = Term::widen(source[given.ids[begin] * given.width + i]);
#pragma unroll 1  // most runs are of one row
            for (long long each = begin + 1; each < end; each++)
                sum = added(sum, Term::widen(source[given.ids[each] * given.width + i]));
            to[i] = Term::narrow(sum);
        }
    }
}
