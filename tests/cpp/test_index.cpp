// Pointers from lengths at the ends of the range, and every fault of an index by name and entry.
#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "check.hpp"
#include "index.hpp"

namespace {

using mdata::Fault;
using Lengths = std::vector<std::int32_t>;
using Offsets = std::vector<std::int64_t>;

void pointers() {
    Offsets out(3);
    CHECK(mdata::pointers_from_lengths(Lengths{3, 0, 2}, 2, 10, out) == 20);
    CHECK((out == Offsets{10, 16, 16}));
    const std::int64_t last = mdata::kLargestOffset;
    CHECK(mdata::pointers_from_lengths(Lengths{1}, 8, last - 8, out) == last);
    CHECK_THROWS(std::overflow_error, mdata::pointers_from_lengths(Lengths{1}, 8, last - 7, out));
    CHECK_THROWS(std::invalid_argument, mdata::pointers_from_lengths(Lengths{1, -1}, 2, 0, out));
}

void check_fault(const Lengths& lengths, const Offsets& pointers, Fault fault, std::int64_t entry) {
    const auto result = mdata::check_sequences(lengths, pointers, 2, 20, 0);
    CHECK(result.fault == fault);
    CHECK(result.fault == Fault::none || result.entry == entry);
}

void sequences() {
    const auto good = mdata::check_sequences(Lengths{3, 0, 2}, Offsets{10, 16, 16}, 2, 20, 10);
    CHECK(good.fault == Fault::none && good.contiguous && good.next == 20 && good.bytes == 10);
    const auto moved = mdata::check_sequences(Lengths{3, 2}, Offsets{4, 0}, 2, 20, 0);
    CHECK(moved.fault == Fault::none && !moved.contiguous && moved.bytes == 10);
    check_fault({3, -1}, {0, 6}, Fault::length_negative, 1);
    check_fault({3, 1}, {0, -2}, Fault::pointer_negative, 1);
    check_fault({3, 1}, {1, 6}, Fault::pointer_unaligned, 0);
    check_fault({3, 8}, {0, 6}, Fault::pointer_past_end, 1);
    check_fault({3, 1}, {0, std::numeric_limits<std::int64_t>::max() - 1}, Fault::pointer_past_end, 1);
    check_fault({std::numeric_limits<std::int32_t>::max()}, {0}, Fault::pointer_past_end, 0);
    check_fault({10}, {0}, Fault::none, 0);
}

void boundaries() {
    const auto fault = [](const Offsets& table, std::int64_t previous) {
        return mdata::check_boundaries(table, 4, previous).fault;
    };
    CHECK(fault({0, 0, 2, 4}, -1) == Fault::none);
    CHECK(fault({2, 4}, 2) == Fault::none);
    CHECK(fault({1, 2}, -1) == Fault::boundary_start);
    CHECK(fault({0, 2, 1}, -1) == Fault::boundary_decreases);
    CHECK(fault({1}, 2) == Fault::boundary_decreases);
    CHECK(fault({0, 5}, -1) == Fault::boundary_past_end);
    CHECK(mdata::check_boundaries(Offsets{0, 2, 1}, 4, -1).entry == 2);
}

}  // namespace

int main() {
    pointers();
    sequences();
    boundaries();
    return check::finish("index");
}
