// Whether this processor has AVX2, and how to mark a function that needs it: the library runs on any x86-64.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#define MDATA_FOR_AVX2 __attribute__((target("avx2")))
#endif

namespace mdata {

inline bool has_wide_vectors() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") != 0;
#else
    return false;
#endif
}

}  // namespace mdata
