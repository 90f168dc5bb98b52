// In place of CUDA's, which is for its own compiler.
#pragma once
#include <cuda_runtime_api.h>
