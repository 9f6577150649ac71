// Sorted runs of records on disk, merged in bounded memory, and the groups that their equal keys make.
//
// A record is one or two words of key, then the number of a document; all are 64 bits. A run is sorted by all of them, so
// that a range of keys is found by bisection, and documents with a key are neighbours in every run. A run that is not
// sorted, which a torn file seldom is, is refused while it is read.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace mdata::runs {

static_assert(std::endian::native == std::endian::little, "files hold little-endian words");

inline constexpr std::size_t kMostWords = 3;

// Sorts records of `Words` words, in place.
template <std::size_t Words>
void sort_records(std::span<std::uint64_t> records) {
    using Record = std::array<std::uint64_t, Words>;
    auto* first = reinterpret_cast<Record*>(records.data());
    std::sort(first, first + records.size() / Words);
}

// Reads `count` words at a byte of a file. Throws std::system_error, or std::invalid_argument where the file ends before.
inline void read_words(int file, std::uint64_t offset, std::uint64_t* words, std::size_t count) {
    auto* at = reinterpret_cast<char*>(words);
    for (std::size_t left = count * sizeof(std::uint64_t); left > 0;) {
        const ssize_t got = ::pread(file, at, left, static_cast<off_t>(offset));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) throw std::system_error(errno, std::generic_category());
        if (got == 0) throw std::invalid_argument("a file of records ends too early");
        at += got, offset += static_cast<std::uint64_t>(got), left -= static_cast<std::size_t>(got);
    }
}

// Records of a file: where the first begins, how many, and what is added to the numbers of their documents.
struct Slice {
    int file;
    std::uint64_t offset, count, added;
};

// How many records of a slice have a first word below `key`.
inline std::uint64_t count_below(const Slice& slice, std::size_t words, std::uint64_t key) {
    std::uint64_t low = 0, high = slice.count;
    while (low < high) {
        const std::uint64_t middle = low + (high - low) / 2;
        std::uint64_t word;
        read_words(slice.file, slice.offset + middle * words * sizeof word, &word, 1);
        word < key ? low = middle + 1 : high = middle;
    }
    return low;
}

// The records of slices in order, a bounded number of them in memory.
class Merger {
public:
    using Record = std::array<std::uint64_t, kMostWords>;

    // words: of a record, the number of its document last. buffer_records: of each slice.
    Merger(std::vector<Slice> slices, std::size_t words, std::size_t buffer_records)
        : words_(words), buffer_records_(std::max<std::size_t>(buffer_records, 1)) {
        for (const Slice& slice : slices) cursors_.push_back({slice, {}, 0, {}, false});
        for (std::size_t number = 0; number < cursors_.size(); ++number)
            if (advance(cursors_[number], number)) heap_.push_back(number);
        for (std::size_t place = heap_.size() / 2; place-- > 0;) sink(place);
    }

    std::size_t words() const { return words_; }

    // Appends at most `limit` records to `records`.
    void read(std::size_t limit, std::vector<std::uint64_t>& records) {
        for (; limit > 0 && !heap_.empty(); --limit) {
            const Record& record = cursors_[heap_[0]].record;
            records.insert(records.end(), record.begin(), record.begin() + static_cast<std::ptrdiff_t>(words_));
            pop();
        }
    }

    // For records whose key an earlier one has: (number of the first with this key, its own number), and with `chain`
    // also (number of the one before, its own), unless that is the first. Stops after `limit` pairs, or one more.
    void edges(std::size_t limit, bool chain, std::vector<std::uint64_t>& pairs) {
        const std::size_t key = words_ - 1;
        while (pairs.size() < 2 * limit && !heap_.empty()) {
            const Record& record = cursors_[heap_[0]].record;
            if (any_ && std::equal(first_.begin(), first_.begin() + static_cast<std::ptrdiff_t>(key), record.begin())) {
                pairs.push_back(first_[key]), pairs.push_back(record[key]);
                if (chain && before_ != first_[key]) pairs.push_back(before_), pairs.push_back(record[key]);
            } else {
                first_ = record, any_ = true;
            }
            before_ = record[key];
            pop();
        }
    }

private:
    struct Cursor {
        Slice left;
        std::vector<std::uint64_t> buffer;
        std::size_t at;
        Record record;
        bool any;
    };

    bool less(std::size_t one, std::size_t other) const { return cursors_[one].record < cursors_[other].record; }

    // Takes the next record of a slice; false at its end.
    bool advance(Cursor& cursor, std::size_t number) {
        if (cursor.at == cursor.buffer.size()) {
            const std::uint64_t count = std::min<std::uint64_t>(cursor.left.count, buffer_records_);
            if (count == 0) return false;
            cursor.buffer.resize(count * words_);
            read_words(cursor.left.file, cursor.left.offset, cursor.buffer.data(), cursor.buffer.size());
            cursor.left.offset += count * words_ * sizeof(std::uint64_t), cursor.left.count -= count;
            cursor.at = 0;
        }
        Record record{};
        std::copy_n(&cursor.buffer[cursor.at], words_, record.begin());
        record[words_ - 1] += cursor.left.added;
        if (cursor.any && record < cursor.record)
            throw std::invalid_argument("run " + std::to_string(number) + " is not sorted");
        cursor.record = record, cursor.any = true;
        cursor.at += words_;
        return true;
    }

    void pop() {
        const std::size_t number = heap_[0];
        if (!advance(cursors_[number], number)) {
            heap_[0] = heap_.back();
            heap_.pop_back();
        }
        sink(0);
    }

    void sink(std::size_t place) {
        for (const std::size_t size = heap_.size(); 2 * place + 1 < size;) {
            std::size_t child = 2 * place + 1;
            if (child + 1 < size && less(heap_[child + 1], heap_[child])) ++child;
            if (!less(heap_[child], heap_[place])) return;
            std::swap(heap_[child], heap_[place]);
            place = child;
        }
    }

    std::size_t words_, buffer_records_;
    std::vector<Cursor> cursors_;
    std::vector<std::size_t> heap_;
    Record first_{};
    std::uint64_t before_ = 0;
    bool any_ = false;
};

// A document of the same group as `document`, not after it; itself: it is the first.
inline std::int64_t parent_of(std::span<const std::int64_t> parents, std::int64_t document) {
    const std::int64_t parent = parents[static_cast<std::size_t>(document)];
    if (parent < 0 || parent > document) throw std::out_of_range("a parent comes after its child");
    return parent;
}

// The first document of the group of each (Galler and Fischer 1964): joins the groups of both ends of each edge.
inline void join_groups(std::span<std::int64_t> parents, std::span<const std::uint64_t> edges) {
    const auto root = [&](std::uint64_t document) {
        auto at = static_cast<std::int64_t>(document);
        for (std::int64_t parent = 0; (parent = parent_of(parents, at)) != at; at = parent) {
            parent = parent_of(parents, parent);
            parents[static_cast<std::size_t>(at)] = parent;
        }
        return at;
    };
    for (std::size_t place = 0; place + 1 < edges.size(); place += 2) {
        if (edges[place] >= parents.size() || edges[place + 1] >= parents.size())
            throw std::out_of_range("an edge names a document that does not exist");
        const std::int64_t one = root(edges[place]), other = root(edges[place + 1]);
        parents[static_cast<std::size_t>(std::max(one, other))] = std::min(one, other);
    }
}

// Replaces each parent by its root. A parent never comes after its child, so one pass is enough.
inline void flatten_groups(std::span<std::int64_t> parents) {
    for (std::size_t document = 0; document < parents.size(); ++document)
        parents[document] = parents[static_cast<std::size_t>(parent_of(parents, static_cast<std::int64_t>(document)))];
}

// Sorted words of a file.
struct WordSet {
    int file;
    std::uint64_t offset, count;
};

// How many words two sets have in common. `buffers` are reused.
inline std::uint64_t common_words(const WordSet& one, const WordSet& other,
                                  std::array<std::vector<std::uint64_t>, 2>& buffers) {
    buffers[0].resize(one.count), buffers[1].resize(other.count);
    read_words(one.file, one.offset, buffers[0].data(), buffers[0].size());
    read_words(other.file, other.offset, buffers[1].data(), buffers[1].size());
    std::uint64_t common = 0;
    for (auto a = buffers[0].begin(), b = buffers[1].begin(); a != buffers[0].end() && b != buffers[1].end();) {
        if (*a == *b) ++common, ++a, ++b;
        else *a < *b ? ++a : ++b;
    }
    return common;
}

}  // namespace mdata::runs
