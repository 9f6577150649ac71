// A set of numbers by its tree of bits, and what a packing must keep: every token once, no row too long.
#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "check.hpp"
#include "packing.hpp"

namespace {

void numbers_are_found_as_in_a_sorted_set() {
    std::mt19937 random(3);
    for (const std::size_t size : {1U, 2U, 63U, 64U, 65U, 4096U, 4097U, 300000U}) {
        mdata::NumberSet ours(size);
        std::set<std::size_t> plain;
        for (int round = 0; round < 3000; ++round) {
            const std::size_t number = random() % size;
            if (random() % 3 != 0) {
                ours.insert(number);
                plain.insert(number);
            } else {
                ours.erase(number);
                plain.erase(number);
            }
            const std::size_t from = random() % (size + 2);
            const auto found = plain.lower_bound(from);
            CHECK(ours.at_least(from) == (found == plain.end() ? mdata::NumberSet::none : *found));
        }
    }
}

void every_token_stands_in_one_row() {
    std::mt19937 random(5);
    for (int round = 0; round < 300; ++round) {
        const auto row_length = static_cast<std::int32_t>(1 + random() % 50);
        std::vector<std::int64_t> lengths(random() % 200);
        for (auto& length : lengths) length = static_cast<std::int64_t>(random() % 120);
        mdata::Packed packed;
        const mdata::Packer packer(row_length);
        packer.pack(lengths, 7, packed);
        packer.pack(lengths, 7 + static_cast<std::int64_t>(lengths.size()), packed);
        std::set<std::pair<std::int64_t, std::int64_t>> seen;
        std::int64_t piece = 0;
        for (const std::int64_t end : packed.row_ends) {
            std::int64_t tokens = 0;
            CHECK(piece < end);
            for (; piece < end; ++piece) {
                const auto p = static_cast<std::size_t>(piece);
                tokens += packed.counts[p];
                for (std::int32_t t = 0; t < packed.counts[p]; ++t) {
                    CHECK(seen.emplace(packed.documents[p], packed.offsets[p] + t).second);
                }
            }
            CHECK(tokens <= row_length);
        }
        std::size_t all = 0;
        for (const std::int64_t length : lengths) all += 2 * static_cast<std::size_t>(length);
        CHECK(seen.size() == all);
    }
}

// With one token in common each token but the first of a document stands once behind another.
void rows_that_overlap_cut_no_pair_apart() {
    std::mt19937 random(6);
    for (int round = 0; round < 300; ++round) {
        const auto row_length = static_cast<std::int32_t>(2 + random() % 20);
        std::vector<std::int64_t> lengths(random() % 100);
        for (auto& length : lengths) length = static_cast<std::int64_t>(random() % 80);
        mdata::Packed packed;
        mdata::Packer(row_length, 1, 2).pack(lengths, 0, packed);
        std::set<std::pair<std::int64_t, std::int64_t>> seen;
        for (std::size_t p = 0; p < packed.counts.size(); ++p) {
            CHECK(packed.counts[p] >= 2);
            for (std::int32_t t = 1; t < packed.counts[p]; ++t) CHECK(seen.emplace(packed.documents[p], packed.offsets[p] + t).second);
        }
        std::size_t all = 0;
        for (const std::int64_t length : lengths) all += static_cast<std::size_t>(std::max<std::int64_t>(length - 1, 0));
        CHECK(seen.size() == all);
    }
}

void a_document_may_be_longer_than_32_bits() {
    mdata::Packed packed;
    const std::vector<std::int64_t> lengths{(std::int64_t{1} << 33) + 5};
    mdata::Packer(1 << 22).pack(lengths, 0, packed);
    CHECK(packed.row_ends.size() == 2049 && packed.offsets.back() == std::int64_t{1} << 33 && packed.counts.back() == 5);
}

void what_cannot_be_packed_is_refused() {
    CHECK_THROWS(std::invalid_argument, mdata::Packer(0));
    CHECK_THROWS(std::invalid_argument, mdata::Packer(mdata::Packer::longest_row + 1));
    mdata::Packed packed;
    CHECK_THROWS(std::invalid_argument, mdata::Packer(4, 4));
    CHECK_THROWS(std::invalid_argument, mdata::Packer(4, 0, 5));
    const std::vector<std::int64_t> lengths{1, -1};
    CHECK_THROWS(std::invalid_argument, (mdata::Packer(4).pack(lengths, 0, packed), 0));
}

}  // namespace

int main() {
    numbers_are_found_as_in_a_sorted_set();
    every_token_stands_in_one_row();
    rows_that_overlap_cut_no_pair_apart();
    a_document_may_be_longer_than_32_bits();
    what_cannot_be_packed_is_refused();
    return check::finish("packing");
}
