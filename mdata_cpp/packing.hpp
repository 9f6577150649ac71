// Best-fit-decreasing packing of documents into rows of a fixed number of tokens.
//
// Source: Ding et al., "Fewer Truncations Improve Language Modeling" (2024). A document longer than a row gives full
// rows from its beginning, each of which begins `overlap` tokens before the end of the previous one; the rest of it,
// and every shorter document, is a piece, if it has at least `least` tokens. From the longest piece to the shortest,
// each goes to the row with the least remaining room that fits it; among equals, to the row that reached that room
// last; if none fits, to a new row. Rows are found by their room through a tree of bits, so a piece costs O(log row
// length / 6). Rows come out in the order in which they were opened, full ones first; pieces of a row in the order of
// documents.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <vector>

namespace mdata {

// A set of numbers in [0, size), by a tree of 64-bit words: each bit tells whether a word below has any.
class NumberSet {
public:
    explicit NumberSet(std::size_t size) {
        for (std::size_t bits = size; levels_.empty() || levels_.back().size() > 1;) {
            bits = (bits + 63) / 64;
            levels_.emplace_back(bits);
        }
    }

    void insert(std::size_t number) {
        for (auto& level : levels_) {
            level[number / 64] |= std::uint64_t{1} << (number % 64);
            number /= 64;
        }
    }

    void erase(std::size_t number) {
        for (auto& level : levels_) {
            level[number / 64] &= ~(std::uint64_t{1} << (number % 64));
            if (level[number / 64] != 0) return;
            number /= 64;
        }
    }

    // The least number that is at least `number`; `none` if there is none.
    static constexpr std::size_t none = std::numeric_limits<std::size_t>::max();
    [[nodiscard]] std::size_t at_least(std::size_t number) const {
        for (std::size_t height = 0; height < levels_.size(); ++height) {
            const auto& level = levels_[height];
            if (number / 64 >= level.size()) return none;
            const std::uint64_t above = level[number / 64] >> (number % 64);
            if (above != 0) return down(height, number + static_cast<std::size_t>(std::countr_zero(above)));
            number = number / 64 + 1;
        }
        return none;
    }

private:
    [[nodiscard]] std::size_t down(std::size_t height, std::size_t number) const {
        while (height-- > 0) {
            number = number * 64 + static_cast<std::size_t>(std::countr_zero(levels_[height][number]));
        }
        return number;
    }

    std::vector<std::vector<std::uint64_t>> levels_;
};

struct Piece {
    std::int64_t document;
    std::int64_t offset;
    std::int32_t count;
};

struct Packed {
    std::vector<std::int64_t> row_ends;   // running count of pieces
    std::vector<std::int64_t> documents;  // of each piece
    std::vector<std::int64_t> offsets;    // its first token in the document
    std::vector<std::int32_t> counts;     // its tokens
};

class Packer {
public:
    // There is a stack of rows for every number of tokens that may be left.
    static constexpr std::int32_t longest_row = 1 << 26;

    explicit Packer(std::int32_t row_length, std::int32_t overlap = 0, std::int32_t least = 1)
        : row_length_(row_length), overlap_(overlap), least_(least) {
        if (row_length < 1 || row_length > longest_row) throw std::invalid_argument("a row length below 1 or above 2^26");
        if (overlap < 0 || overlap >= row_length) throw std::invalid_argument("an overlap outside of a row");
        if (least < 1 || least > row_length) throw std::invalid_argument("a least piece outside of a row");
    }

    // Packs documents number `first`, first + 1, ... of these lengths; rows are added to what was packed before.
    void pack(std::span<const std::int64_t> lengths, std::int64_t first, Packed& out) const {
        std::vector<Piece> pieces;
        cut(lengths, first, pieces, out);
        std::vector<std::int64_t> row(pieces.size());
        const std::int64_t rows = fit(pieces, row);
        lay_out(pieces, row, rows, out);
    }

private:
    // Full rows go out at once; the pieces that are left are to be fitted.
    void cut(std::span<const std::int64_t> lengths, std::int64_t first, std::vector<Piece>& pieces, Packed& out) const {
        for (std::size_t d = 0; d < lengths.size(); ++d) {
            if (lengths[d] < 0) throw std::invalid_argument("a negative length");
            const std::int64_t document = first + static_cast<std::int64_t>(d);
            std::int64_t offset = 0;
            for (; lengths[d] - offset >= row_length_; offset += row_length_ - overlap_) {
                add({document, offset, row_length_}, out);
                out.row_ends.push_back(static_cast<std::int64_t>(out.documents.size()));
            }
            const auto left = static_cast<std::int32_t>(lengths[d] - offset);  // less than a row
            // What every row before has given already is no piece.
            if (left >= least_ && (offset == 0 || left > overlap_)) pieces.push_back({document, offset, left});
        }
    }

    // The row of each piece; returns how many rows there are.
    std::int64_t fit(const std::vector<Piece>& pieces, std::vector<std::int64_t>& row) const {
        const auto size = static_cast<std::size_t>(row_length_) + 1;
        // Pieces by length, the longest first, equal ones in the order of documents: a counting sort.
        std::vector<std::size_t> place(size + 1);
        for (const Piece& piece : pieces) ++place[size - static_cast<std::size_t>(piece.count)];
        for (std::size_t k = 1; k <= size; ++k) place[k] += place[k - 1];
        std::vector<std::size_t> sorted(pieces.size());
        for (std::size_t k = pieces.size(); k-- > 0;) sorted[--place[size - static_cast<std::size_t>(pieces[k].count)]] = k;
        // Rows by the room they have: a stack for each, linked through `below`.
        NumberSet rooms(size);
        constexpr std::int64_t empty = -1;
        std::vector<std::int64_t> top(size, empty);
        std::vector<std::int64_t> below;
        for (const std::size_t k : sorted) {
            const auto count = static_cast<std::size_t>(pieces[k].count);
            std::size_t room = rooms.at_least(count);
            std::int64_t chosen = 0;
            if (room == NumberSet::none) {
                chosen = static_cast<std::int64_t>(below.size());
                below.push_back(empty);
                room = static_cast<std::size_t>(row_length_);
            } else {
                chosen = top[room];
                top[room] = below[static_cast<std::size_t>(chosen)];
                if (top[room] == empty) rooms.erase(room);
            }
            row[k] = chosen;
            const std::size_t left = room - count;
            if (left > 0) {
                if (top[left] == empty) rooms.insert(left);
                below[static_cast<std::size_t>(chosen)] = top[left];
                top[left] = chosen;
            }
        }
        return static_cast<std::int64_t>(below.size());
    }

    static void lay_out(const std::vector<Piece>& pieces, const std::vector<std::int64_t>& row, std::int64_t rows,
                        Packed& out) {
        std::vector<std::size_t> next(static_cast<std::size_t>(rows) + 1, out.documents.size());
        for (const std::int64_t r : row) ++next[static_cast<std::size_t>(r) + 1];
        for (std::size_t r = 1; r < next.size(); ++r) next[r] += next[r - 1] - out.documents.size();
        for (std::size_t r = 1; r < next.size(); ++r) out.row_ends.push_back(static_cast<std::int64_t>(next[r]));
        const std::size_t before = out.documents.size();
        out.documents.resize(before + pieces.size());
        out.offsets.resize(before + pieces.size());
        out.counts.resize(before + pieces.size());
        for (std::size_t k = 0; k < pieces.size(); ++k) {
            const std::size_t place = next[static_cast<std::size_t>(row[k])]++;
            out.documents[place] = pieces[k].document;
            out.offsets[place] = pieces[k].offset;
            out.counts[place] = pieces[k].count;
        }
    }

    static void add(const Piece& piece, Packed& out) {
        out.documents.push_back(piece.document);
        out.offsets.push_back(piece.offset);
        out.counts.push_back(piece.count);
    }

    std::int32_t row_length_, overlap_, least_;
};

}  // namespace mdata
