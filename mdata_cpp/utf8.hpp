// Code points of UTF-8 that Python made, which is valid, and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace mdata {

struct Code {
    std::uint32_t value;
    std::uint32_t size;  // bytes
};

inline Code code_at(std::string_view text, std::size_t at) {
    const auto byte = [&](std::size_t place) { return static_cast<std::uint32_t>(text[at + place]) & 0x3F; };
    const auto lead = static_cast<unsigned char>(text[at]);
    if (lead < 0x80) return {lead, 1};
    if (lead < 0xE0) return {(lead & 0x1FU) << 6 | byte(1), 2};
    if (lead < 0xF0) return {(lead & 0x0FU) << 12 | byte(1) << 6 | byte(2), 3};
    return {(lead & 0x07U) << 18 | byte(1) << 12 | byte(2) << 6 | byte(3), 4};
}

// Where the last code point of a text that is not empty begins.
inline std::size_t last_code_begin(std::string_view text) {
    std::size_t at = text.size() - 1;
    while ((static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
    return at;
}

// Writes a code point to `bytes`, which has room for 4; how many it takes.
inline std::size_t write_code(std::uint32_t code, char* bytes) {
    const auto tail = [&](int shift) { return static_cast<char>(0x80 | (code >> shift & 0x3F)); };
    if (code < 0x80) {
        bytes[0] = static_cast<char>(code);
        return 1;
    }
    if (code < 0x800) {
        bytes[0] = static_cast<char>(0xC0 | code >> 6), bytes[1] = tail(0);
        return 2;
    }
    if (code < 0x10000) {
        bytes[0] = static_cast<char>(0xE0 | code >> 12), bytes[1] = tail(6), bytes[2] = tail(0);
        return 3;
    }
    bytes[0] = static_cast<char>(0xF0 | code >> 18), bytes[1] = tail(12), bytes[2] = tail(6), bytes[3] = tail(0);
    return 4;
}

inline void append_code(std::uint32_t code, std::string& text) {
    char bytes[4];
    text.append(bytes, write_code(code, bytes));
}

}  // namespace mdata
