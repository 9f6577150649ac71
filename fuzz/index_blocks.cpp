// The arithmetic of an .idx file in blocks (mdata_cpp/index.hpp) against its definition in 128-bit integers.
//
// The bytes become one table of lengths, pointers and boundaries. Checked whole and cut in two blocks, the answers must be
// those of a slow twin that cannot overflow. Built with libFuzzer where clang is, else with fuzz/driver.cpp.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "input.hpp"
#include "index.hpp"

namespace {

using Wide = __int128;
using mdata::Fault;
using Lengths = std::vector<std::int32_t>;
using Offsets = std::vector<std::int64_t>;

struct Input {
    std::int64_t item_size, bin_size, start, num_sequences;
    std::size_t cut, boundary_cut;
    Lengths lengths;
    Offsets pointers, boundaries;
};

Input read_input(const std::uint8_t* data, std::size_t size) {
    ByteSource bytes(data, size);
    Input input;
    input.item_size = std::int64_t{1} << (bytes.byte() & 3);
    input.bin_size = bytes.number() & mdata::kLargestOffset;
    input.start = bytes.number() & mdata::kLargestOffset & ~(input.item_size - 1);
    const std::size_t count = bytes.byte() % 16;
    const bool follow = bytes.byte() & 1;  // pointers as a writer makes them, unless a byte says otherwise
    std::int64_t next = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const auto length = static_cast<std::int32_t>(bytes.number());
        const std::int64_t pointer = follow ? next : bytes.number();
        input.lengths.push_back(length);
        input.pointers.push_back(pointer);
        next = static_cast<std::int64_t>((static_cast<Wide>(pointer) + static_cast<Wide>(length) * input.item_size) &
                                         mdata::kLargestOffset);
    }
    input.cut = bytes.byte() % (count + 1);
    input.num_sequences = bytes.number() & mdata::kLargestOffset;
    const std::size_t num_boundaries = bytes.byte() % 16;
    for (std::size_t i = 0; i < num_boundaries; ++i) input.boundaries.push_back(bytes.number());
    input.boundary_cut = bytes.byte() % (num_boundaries + 1);
    return input;
}

Fault fault_of(const Input& input, std::size_t i) {
    const Wide bytes = static_cast<Wide>(input.lengths[i]) * input.item_size;
    const Wide pointer = input.pointers[i];
    if (bytes < 0) return Fault::length_negative;
    if (pointer < 0) return Fault::pointer_negative;
    if (pointer % input.item_size != 0) return Fault::pointer_unaligned;
    if (pointer + bytes > input.bin_size) return Fault::pointer_past_end;
    return Fault::none;
}

void sequences(const Input& input) {
    const auto whole = mdata::check_sequences(input.lengths, input.pointers, input.item_size, input.bin_size, 0);
    Wide next = 0, sum = 0;
    bool contiguous = true;
    for (std::size_t i = 0; i < input.lengths.size(); ++i) {
        const Fault fault = fault_of(input, i);
        if (fault != Fault::none) {
            REQUIRE(whole.fault == fault);
            REQUIRE(whole.entry == static_cast<std::int64_t>(i));
            return;
        }
        const Wide bytes = static_cast<Wide>(input.lengths[i]) * input.item_size;
        contiguous = contiguous && input.pointers[i] == next;
        next = input.pointers[i] + bytes;
        sum += bytes;
    }
    REQUIRE(whole.fault == Fault::none);
    REQUIRE(whole.contiguous == contiguous);
    REQUIRE(whole.next == next);
    REQUIRE(whole.bytes == std::min<Wide>(sum, mdata::kLargestOffset));

    const std::span lengths(input.lengths);
    const std::span pointers(input.pointers);
    const auto first = mdata::check_sequences(lengths.first(input.cut), pointers.first(input.cut), input.item_size,
                                              input.bin_size, 0);
    const auto second = mdata::check_sequences(lengths.subspan(input.cut), pointers.subspan(input.cut),
                                               input.item_size, input.bin_size, first.next);
    REQUIRE(first.fault == Fault::none && second.fault == Fault::none);
    REQUIRE((first.contiguous && second.contiguous) == whole.contiguous);
    REQUIRE(second.next == whole.next);
    REQUIRE(std::min<Wide>(static_cast<Wide>(first.bytes) + second.bytes, mdata::kLargestOffset) == whole.bytes);
}

void boundaries(const Input& input) {
    const auto whole = mdata::check_boundaries(input.boundaries, input.num_sequences, -1);
    std::int64_t previous = 0;
    Fault expected = Fault::none;
    std::size_t entry = 0;
    for (; entry < input.boundaries.size() && expected == Fault::none; ++entry) {
        const std::int64_t boundary = input.boundaries[entry];
        if (entry == 0 && boundary != 0) expected = Fault::boundary_start;
        else if (boundary < previous) expected = Fault::boundary_decreases;
        else if (boundary > input.num_sequences) expected = Fault::boundary_past_end;
        previous = boundary;
    }
    REQUIRE(whole.fault == expected);
    if (expected != Fault::none) {
        REQUIRE(whole.entry == static_cast<std::int64_t>(entry) - 1);
        return;
    }
    const std::span table(input.boundaries);
    const auto cut = table.first(input.boundary_cut);
    REQUIRE(mdata::check_boundaries(cut, input.num_sequences, -1).fault == Fault::none);
    const auto rest = table.subspan(input.boundary_cut);
    REQUIRE(mdata::check_boundaries(rest, input.num_sequences, cut.empty() ? -1 : cut.back()).fault == Fault::none);
}

// What the writer makes of lengths is what the checks take.
void written(const Input& input) {
    Offsets made(input.lengths.size());
    Wide next = input.start;
    bool negative = false, too_far = false;
    for (const std::int32_t length : input.lengths) {
        negative = length < 0;
        if (negative) break;
        next += static_cast<Wide>(length) * input.item_size;
        too_far = next > mdata::kLargestOffset;
        if (too_far) break;
    }
    try {
        const auto end = mdata::pointers_from_lengths(input.lengths, input.item_size, input.start, made);
        REQUIRE(!negative && !too_far && end == next);
        const auto found = mdata::check_sequences(input.lengths, made, input.item_size, end, input.start);
        REQUIRE(found.fault == Fault::none && found.contiguous);
        REQUIRE(found.next == end && found.bytes == end - input.start);
    } catch (const std::invalid_argument&) {
        REQUIRE(negative);
    } catch (const std::overflow_error&) {
        REQUIRE(too_far);
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const Input input = read_input(data, size);
    sequences(input);
    boundaries(input);
    written(input);
    return 0;
}
