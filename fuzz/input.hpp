// What the C++ targets share: REQUIRE, which ends the run at a broken rule, and the bytes of an input as values.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#define REQUIRE(condition)                                                            \
    do {                                                                              \
        if (!(condition)) {                                                           \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                             \
        }                                                                             \
    } while (false)

// Takes values off the front of the input; zeros behind its end.
class ByteSource {
public:
    ByteSource(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}

    std::uint8_t byte() {
        if (left_ == 0) return 0;
        --left_;
        return *data_++;
    }

    // Small numbers in one byte, so that tables agree now and then; 253 to 255 stand before eight bytes of any value.
    std::int64_t number() {
        const std::uint8_t first = byte();
        if (first < 253) return first;
        std::uint64_t value = 0;
        for (int i = 0; i < 8; ++i) value = value << 8 | byte();
        return static_cast<std::int64_t>(value);
    }

    // At most so many of them.
    std::vector<std::int64_t> numbers(std::size_t most) {
        std::vector<std::int64_t> found(byte() % (most + 1));
        for (auto& value : found) value = number();
        return found;
    }

    // At most so many bytes, as they are.
    std::string text(std::size_t most) {
        const std::size_t size = std::min(most, left_);
        std::string out(reinterpret_cast<const char*>(data_), size);
        data_ += size;
        left_ -= size;
        return out;
    }

private:
    const std::uint8_t* data_;
    std::size_t left_;
};
