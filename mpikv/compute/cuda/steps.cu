// The numbers of updates that are run again and again, written to memory from the arguments of a launch: those are copied
// when it is queued, so that the host need not keep them.

enum { KEYS = 2400, ROWS = 16, NUMBERS = 12 };

// What one launch is given, by value: at most 4096 bytes. loading.py reads its fields here.
struct Numbers {
    double* target;
    long long count;
    double numbers[ROWS * NUMBERS];
    unsigned char row[KEYS];  // which of these rows is a key's
};

__global__ void write_numbers(const GRID_CONSTANT Numbers given) {
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < given.count * NUMBERS; i += stride)
        given.target[i] = given.numbers[given.row[i / NUMBERS] * NUMBERS + i % NUMBERS];
}
