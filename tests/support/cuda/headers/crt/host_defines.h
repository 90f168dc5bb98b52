// In place of a header of CUDA's that is in another package: words that a compiler of the host need not know.
#define __host__
#define __device__
#define __device_builtin__
#define __cudart_builtin__
#define __builtin_align__(size) __attribute__((aligned(size)))
#define __align__(size) __attribute__((aligned(size)))
#define __location__(what)
#define CUDARTAPI
#define CUDARTAPI_CDECL
