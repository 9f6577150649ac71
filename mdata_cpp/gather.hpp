// Reads many samples at once: runs of tokens from mapped files or by pread, widened to int64, into rows of one buffer.
//
// A store is the shards of one corpus; token t of the store is token t - (tokens of the earlier shards) of a shard's
// .bin. A row consists of one or more concatenated runs (first token, count); the rest of the row is filled with one
// value. Every run is checked against the bounds of store and row before a byte is read, and a run may cross shards.
// While mapped bytes are read, those of the next run are prefetched; a file is read in pieces of 64 KiB. A file that
// ends too early is reported, not read past, and so is a truncated map. Rows are divided among threads in parts.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <system_error>
#include <utility>
#include <vector>

#include "file_pool.hpp"
#include "helpers.hpp"
#include "map_guard.hpp"
#include "widen.hpp"

namespace mdata {

// The tokens of one .bin: mapped bytes, or a file where `bytes` is null.
struct TokenFile {
    const std::byte* bytes = nullptr;
    std::shared_ptr<PooledFile> file;
    std::int64_t num_tokens = 0;
};

// What a file did not give: its shard, the byte asked for, the system's error (0: the file ends there; ESTALE: another
// file lies there; EIO of mapped bytes: it was cut, or its device fails).
struct ReadFault {
    std::size_t shard;
    std::int64_t byte;
    int error;
};

// Runs of rows: run r is tokens [first[r], first[r] + count[r]); row i has the runs up to ends[i], behind those of row
// i - 1 (ends empty: one run a row), and goes to row places[i] of the buffer (places empty: to row i).
struct RowRuns {
    std::span<const std::int64_t> first;
    std::span<const std::int64_t> count;
    std::span<const std::int64_t> ends;
    std::span<const std::int64_t> places;

    std::size_t rows() const { return ends.empty() ? first.size() : ends.size(); }
    std::size_t begin(std::size_t row) const {
        if (ends.empty()) return row;
        return row == 0 ? 0 : static_cast<std::size_t>(ends[row - 1]);
    }
    std::size_t end(std::size_t row) const { return ends.empty() ? row + 1 : static_cast<std::size_t>(ends[row]); }
    std::size_t place(std::size_t row) const { return places.empty() ? row : static_cast<std::size_t>(places[row]); }
};

struct RowBuffer {
    std::span<std::int64_t> cells;
    std::size_t width;
    std::int64_t fill;
};

class TokenStore {
public:
    // At most 2^60 tokens in all, so that bytes have 63 bits.
    TokenStore(TokenType type, std::vector<TokenFile> files)
        : type_(type), size_(static_cast<std::int64_t>(size_of(type))), files_(std::move(files)) {
        for (const TokenFile& file : files_) {
            if (file.num_tokens < 0 || file.num_tokens > kMostTokens - num_tokens_) {
                throw std::overflow_error("a negative number of tokens, or more than 2^60 in all");
            }
            num_tokens_ += file.num_tokens;
            ends_.push_back(num_tokens_);
        }
    }

    TokenType type() const { return type_; }
    std::int64_t num_tokens() const { return num_tokens_; }

    // Fill rows; the first fault found, if a file gave less than it should. Raises out_of_range for a run outside of
    // the store and invalid_argument for runs that do not fit their rows; nothing is read then.
    std::optional<ReadFault> gather(const RowRuns& runs, const RowBuffer& out, std::size_t threads) const {
        check(runs, out);
        const std::size_t rows = runs.rows();
        const std::size_t worth = std::min(rows, rows * out.width / kLeastCellsForPart);
        // More parts than threads where there is much to do: who begins late, or is interrupted, does fewer.
        const std::size_t most = kMostPartsForThread * std::min(threads, Helpers::kMost + 1);
        const std::size_t parts = threads < 2 || worth < 2 ? 1 : std::min(worth, most);
        std::vector<std::optional<ReadFault>> faults(parts);
        const auto edge = [&](std::size_t part) { return rows * part / parts; };
        Helpers::shared().share(parts, threads - 1, [&](std::size_t part) noexcept {
            faults[part] = fill(runs, out, edge(part), edge(part + 1));
        });
        for (const auto& fault : faults) {
            if (fault) return fault;
        }
        return std::nullopt;
    }

private:
    static constexpr std::int64_t kMostTokens = std::int64_t{1} << 60;
    static constexpr std::size_t kLeastCellsForPart = 1 << 14;
    static constexpr std::size_t kMostPartsForThread = 4;
    static constexpr std::size_t kPieceBytes = 1 << 16;

    // A part of a run that lies in one shard.
    struct Piece {
        std::size_t shard;
        std::int64_t byte;
        std::size_t count;
        std::int64_t* to;
    };

    void check(const RowRuns& runs, const RowBuffer& out) const {
        if (runs.first.size() != runs.count.size()) throw std::invalid_argument("firsts and counts differ in number");
        const std::size_t rows = runs.rows();
        if (!runs.places.empty() && runs.places.size() != rows) throw std::invalid_argument("a place for each row");
        const std::size_t room = out.width == 0 ? 0 : out.cells.size() / out.width;
        if (runs.places.empty() && rows > room) throw std::invalid_argument("more rows than the buffer has");
        for (const std::int64_t place : runs.places) {
            if (place < 0 || static_cast<std::uint64_t>(place) >= room) throw std::out_of_range("a row outside of the buffer");
        }
        std::int64_t before = 0;
        for (const std::int64_t end : runs.ends) {
            if (end < before) throw std::invalid_argument("ends of rows that decrease");
            before = end;
        }
        if (!runs.ends.empty() && static_cast<std::uint64_t>(before) != runs.first.size()) {
            throw std::invalid_argument("the last row does not end with the last run");
        }
        for (std::size_t row = 0; row < rows; ++row) {
            std::size_t left = out.width;
            for (std::size_t run = runs.begin(row); run < runs.end(row); ++run) left -= checked(runs, run, left);
        }
    }

    std::size_t checked(const RowRuns& runs, std::size_t run, std::size_t left) const {
        const std::int64_t first = runs.first[run];
        const std::int64_t count = runs.count[run];
        if (first < 0 || count < 0 || first > num_tokens_ || count > num_tokens_ - first) {
            throw std::out_of_range("a run outside of the store");
        }
        if (static_cast<std::uint64_t>(count) > left) throw std::invalid_argument("runs longer than their row");
        return static_cast<std::size_t>(count);
    }

    std::optional<ReadFault> fill(const RowRuns& runs, const RowBuffer& out, std::size_t first_row, std::size_t last_row) const {
        std::vector<Piece> pieces;
        pieces.reserve(runs.end(last_row == 0 ? 0 : last_row - 1) - runs.begin(first_row) + 8);
        for (std::size_t row = first_row; row < last_row; ++row) {
            std::int64_t* to = out.cells.data() + runs.place(row) * out.width;
            std::int64_t* const end = to + out.width;
            for (std::size_t run = runs.begin(row); run < runs.end(row); ++run) {
                to = cut_at_shards(runs.first[run], runs.count[run], to, pieces);
            }
            std::fill(to, end, out.fill);
        }
        return copy(pieces);
    }

    std::int64_t* cut_at_shards(std::int64_t first, std::int64_t count, std::int64_t* to, std::vector<Piece>& pieces) const {
        auto shard = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin());
        for (; count > 0; ++shard) {
            const std::int64_t taken = std::min(count, ends_[shard] - first);
            if (taken == 0) continue;  // a shard without tokens
            const std::int64_t inside = first - (ends_[shard] - files_[shard].num_tokens);
            pieces.push_back({shard, inside * size_, static_cast<std::size_t>(taken), to});
            first += taken;
            count -= taken;
            to += taken;
        }
        return to;
    }

    std::optional<ReadFault> copy(std::span<const Piece> pieces) const {
        MapGuard guard;
        if (sigsetjmp(guard.back, 0) != 0) {
            const std::size_t shard = pieces[guard.item()].shard;
            return ReadFault{shard, guard.stopped() - files_[shard].bytes, EIO};
        }
        if (!pieces.empty()) ask_for(pieces.front());
        for (std::size_t i = 0; i < pieces.size(); ++i) {
            const Piece& piece = pieces[i];
            const TokenFile& file = files_[piece.shard];
            if (file.bytes == nullptr) {
                guard.reads(i, nullptr, 0);
                if (const auto fault = read(file, piece)) return fault;
                continue;
            }
            const std::byte* from = file.bytes + piece.byte;
            guard.reads(i, from, piece.count * static_cast<std::size_t>(size_));
            widen_(from, piece.to, piece.count, i + 1 < pieces.size() ? mapped(pieces[i + 1], from) : from);
        }
        return std::nullopt;
    }

    // Nothing is read in front of the first piece that could ask for it.
    void ask_for(const Piece& piece) const {
        const std::byte* const from = mapped(piece, nullptr);
        const std::size_t bytes = piece.count * static_cast<std::size_t>(size_);
        for (std::size_t at = 0; from != nullptr && at < bytes; at += widening::kLine) __builtin_prefetch(from + at, 0, 2);
    }

    const std::byte* mapped(const Piece& piece, const std::byte* otherwise) const {
        const TokenFile& file = files_[piece.shard];
        return file.bytes == nullptr ? otherwise : file.bytes + piece.byte;
    }

    std::optional<ReadFault> read(const TokenFile& file, const Piece& piece) const {
        alignas(8) std::array<std::byte, kPieceBytes> bytes;
        const std::size_t item = static_cast<std::size_t>(size_);
        std::int64_t at = piece.byte;
        try {
            const auto open = file.file->use();
            for (std::size_t done = 0; done < piece.count;) {
                const std::size_t wanted = std::min(piece.count - done, kPieceBytes / item) * item;
                const std::size_t got = open->read({bytes.data(), wanted}, at);
                if (got < wanted) return ReadFault{piece.shard, at + static_cast<std::int64_t>(got), 0};
                widen_(bytes.data(), piece.to + done, wanted / item, bytes.data());
                done += wanted / item;
                at += static_cast<std::int64_t>(wanted);
            }
        } catch (const std::system_error& error) {
            return ReadFault{piece.shard, at, error.code().value()};
        }
        return std::nullopt;
    }

    TokenType type_;
    std::int64_t size_;
    Widen widen_ = widen_of(type_);
    std::vector<TokenFile> files_;
    std::vector<std::int64_t> ends_;  // running sum of tokens
    std::int64_t num_tokens_ = 0;
};

}  // namespace mdata
