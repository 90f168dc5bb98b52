// The numbers of updates that are run again and again, written to memory from the arguments of a launch: those are copied
// when it is queued, so that the host need not keep them.

enum { WORDS = 510 };

// What one launch is given, by value: at most 4096 bytes. mpikv/cuda/steps.py has the same.
struct Numbers {
    double* target;
    long long count;
    double numbers[WORDS];
};

__global__ void write_numbers(const GRID_CONSTANT Numbers given) {
    for (long long i = threadIdx.x; i < given.count; i += blockDim.x) given.target[i] = given.numbers[i];
}
