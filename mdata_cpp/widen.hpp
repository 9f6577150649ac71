// Converts tokens of a file to int64: one loop for each type on disk, compiled twice, for any x86-64 and for AVX2.
//
// A read of random samples waits for memory more than it computes, so the loop also prefetches the bytes that are read
// next (`next`) while it stores the present ones; prefetching an invalid address does nothing. Non-temporal stores were
// tried for buffers larger than the caches, and were slower on a busy machine. Bytes may be at any address. Little
// endian on both sides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__) && defined(__GNUC__)
#define MDATA_TWO_LEVELS 1
#endif

namespace mdata {

enum class TokenType { uint8, int8, uint16, int16, int32, int64 };

inline std::size_t size_of(TokenType type) {
    switch (type) {
        case TokenType::uint8:
        case TokenType::int8: return 1;
        case TokenType::uint16:
        case TokenType::int16: return 2;
        case TokenType::int32: return 4;
        case TokenType::int64: return 8;
    }
    throw std::invalid_argument("a token type outside of the six");
}

namespace widening {

inline constexpr std::size_t kLine = 64;

// Plain code; whoever includes it into a function decides for which processor it is compiled.
template <typename T>
[[gnu::always_inline]] inline void run(const std::byte* from, std::int64_t* to, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        T value;
        std::memcpy(&value, from + i * sizeof(T), sizeof(T));
        to[i] = value;
    }
}

template <typename T>
[[gnu::always_inline]] inline void lines(const std::byte* from, std::int64_t* to, std::size_t count,
                                         const std::byte* next) {
    constexpr std::size_t kStep = kLine / sizeof(T);
    std::size_t i = 0;
    for (; i + kStep <= count; i += kStep) {
        __builtin_prefetch(next + i * sizeof(T), 0, 2);
        run<T>(from + i * sizeof(T), to + i, kStep);
    }
    __builtin_prefetch(next + i * sizeof(T), 0, 2);
    run<T>(from + i * sizeof(T), to + i, count - i);
}

using Widen = void (*)(const std::byte*, std::int64_t*, std::size_t, const std::byte*);

template <typename T>
void widen_any(const std::byte* from, std::int64_t* to, std::size_t count, const std::byte* next) {
    lines<T>(from, to, count, next);
}

#ifdef MDATA_TWO_LEVELS
template <typename T>
__attribute__((target("avx2"))) void widen_avx2(const std::byte* from, std::int64_t* to, std::size_t count,
                                                const std::byte* next) {
    lines<T>(from, to, count, next);
}
#endif

template <typename T>
Widen choose() {
#ifdef MDATA_TWO_LEVELS
    if (__builtin_cpu_supports("avx2")) return &widen_avx2<T>;
#endif
    return &widen_any<T>;
}

}  // namespace widening

using widening::Widen;

// widen(from, to, count, next) for tokens of a type: count tokens at `from` into `to`, asking for those at `next`.
inline Widen widen_of(TokenType type) {
    switch (type) {
        case TokenType::uint8: return widening::choose<std::uint8_t>();
        case TokenType::int8: return widening::choose<std::int8_t>();
        case TokenType::uint16: return widening::choose<std::uint16_t>();
        case TokenType::int16: return widening::choose<std::int16_t>();
        case TokenType::int32: return widening::choose<std::int32_t>();
        case TokenType::int64: return widening::choose<std::int64_t>();
    }
    throw std::invalid_argument("a token type outside of the six");
}

}  // namespace mdata
