// In place of CUDA's, of which only its own compiler needs more.
#pragma once
