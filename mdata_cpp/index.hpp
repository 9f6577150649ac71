// The arithmetic of an .idx file, in blocks: pointers from lengths, and whether lengths, pointers and boundaries agree.
//
// Each function takes one block and the state left by the previous block, so that a file of any size is written and
// checked in bounded memory. The layout of the file is in docs/reference/formats.md. Slow twin: tests/reference/indexed.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>

namespace mdata {

inline constexpr std::int64_t kLargestOffset = std::numeric_limits<std::int64_t>::max();

// Fills pointers with the byte offsets of sequences that follow each other from byte `start`; returns the end.
inline std::int64_t pointers_from_lengths(std::span<const std::int32_t> lengths, std::int64_t item_size,
                                          std::int64_t start, std::span<std::int64_t> pointers) {
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        if (lengths[i] < 0) throw std::invalid_argument("a length is negative");
        pointers[i] = start;
        const std::int64_t bytes = lengths[i] * item_size;  // under 2^31 x 8
        if (bytes > kLargestOffset - start) throw std::overflow_error("the offsets exceed 63 bits");
        start += bytes;
    }
    return start;
}

enum class Fault { none, length_negative, pointer_negative, pointer_unaligned, pointer_past_end,
                   boundary_start, boundary_decreases, boundary_past_end };

struct SequenceCheck {
    Fault fault = Fault::none;
    std::int64_t entry = 0;       // of the fault, within the block
    bool contiguous = true;       // every pointer was the end of the sequence before it
    std::int64_t next = 0;        // end of the block's last sequence: the pointer expected next
    std::int64_t bytes = 0;       // of all sequences of the block
};

// One block of lengths with their pointers, against the size of .bin; `expected` is the block's first pointer if the
// sequences follow each other.
inline SequenceCheck check_sequences(std::span<const std::int32_t> lengths, std::span<const std::int64_t> pointers,
                                     std::int64_t item_size, std::int64_t bin_size, std::int64_t expected) {
    SequenceCheck result;
    result.next = expected;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        result.entry = static_cast<std::int64_t>(i);
        const std::int64_t bytes = lengths[i] * item_size;
        if (lengths[i] < 0) result.fault = Fault::length_negative;
        else if (pointers[i] < 0) result.fault = Fault::pointer_negative;
        else if (pointers[i] % item_size != 0) result.fault = Fault::pointer_unaligned;
        else if (bytes > bin_size || pointers[i] > bin_size - bytes) result.fault = Fault::pointer_past_end;
        if (result.fault != Fault::none) return result;
        result.contiguous = result.contiguous && pointers[i] == result.next;
        result.next = pointers[i] + bytes;
        // Overlapping sequences may sum to more than 63 bits; they are refused by their sum, so it may stop growing.
        result.bytes = bytes > kLargestOffset - result.bytes ? kLargestOffset : result.bytes + bytes;
    }
    return result;
}

struct BoundaryCheck {
    Fault fault = Fault::none;
    std::int64_t entry = 0;
};

// One block of document boundaries; `previous` is the boundary before the block, or -1 at the start of the table.
inline BoundaryCheck check_boundaries(std::span<const std::int64_t> boundaries, std::int64_t num_sequences,
                                      std::int64_t previous) {
    BoundaryCheck result;
    for (std::size_t i = 0; i < boundaries.size(); ++i) {
        result.entry = static_cast<std::int64_t>(i);
        if (previous == -1 && boundaries[i] != 0) result.fault = Fault::boundary_start;
        else if (boundaries[i] < previous) result.fault = Fault::boundary_decreases;
        else if (boundaries[i] > num_sequences) result.fault = Fault::boundary_past_end;
        if (result.fault != Fault::none) return result;
        previous = boundaries[i];
    }
    return result;
}

}  // namespace mdata
