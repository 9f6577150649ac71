// The batched read: rows from maps and files, documents inside rows, and everything that is wrong refused.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "block_shuffle.hpp"
#include "check.hpp"
#include "file_map.hpp"
#include "forks.hpp"
#include "gather.hpp"
#include "native_rows.hpp"
#include "rows.hpp"
#include "sequences.hpp"

namespace {

using Numbers = std::vector<std::int64_t>;
using mdata::RowRuns;
using mdata::TokenStore;
using mdata::TokenType;

template <typename T>
std::vector<std::byte> bytes_of(const std::vector<T>& values, std::size_t shift = 0) {
    std::vector<std::byte> bytes(values.size() * sizeof(T) + shift);
    if (!values.empty()) std::memcpy(bytes.data() + shift, values.data(), values.size() * sizeof(T));
    return bytes;
}

// Every type widens with its sign, at any address, for any count.
template <typename T>
void widens(TokenType type) {
    std::mt19937 random(7);
    std::vector<T> tokens(300);
    for (auto& token : tokens) token = static_cast<T>(random());
    for (const std::size_t shift : {0U, 1U, 3U}) {
        const auto bytes = bytes_of(tokens, shift);
        const TokenStore store(type, {{bytes.data() + shift, nullptr, 300}});
        for (const std::int64_t count : {0, 1, 7, 8, 31, 32, 33, 64, 299, 300}) {
            const Numbers first{300 - count};
            const Numbers counts{count};
            Numbers out(301, -7);
            CHECK(!store.gather({first, counts, {}, {}}, {out, 301, 5}, 1));
            for (std::int64_t i = 0; i < 301; ++i) {
                const auto at = static_cast<std::size_t>(i);
                const std::int64_t expected = i < count ? static_cast<std::int64_t>(tokens[static_cast<std::size_t>(300 - count + i)]) : 5;
                CHECK(out[at] == expected);
            }
        }
    }
}

// A file of so many uint16 tokens 0, 1, 2 ..., gone with the object.
class Temporary {
public:
    explicit Temporary(int tokens) : file_(std::tmpfile()) {
        for (int i = 0; i < tokens; ++i) {
            const auto token = static_cast<std::uint16_t>(i);
            std::fwrite(&token, sizeof(token), 1, file_);
        }
        std::fflush(file_);
        struct stat facts {};
        CHECK(::fstat(fileno(file_), &facts) == 0);
        pooled_ = std::make_shared<mdata::PooledFile>(std::make_shared<mdata::FilePool>(), path(), mdata::identity_of(facts));
    }
    ~Temporary() { std::fclose(file_); }
    Temporary(const Temporary&) = delete;
    Temporary& operator=(const Temporary&) = delete;
    std::string path() const { return "/proc/self/fd/" + std::to_string(fileno(file_)); }
    const std::shared_ptr<mdata::PooledFile>& pooled() const { return pooled_; }
    void cut(int bytes) const { CHECK(::ftruncate(fileno(file_), bytes) == 0); }

private:
    std::FILE* file_;
    std::shared_ptr<mdata::PooledFile> pooled_;
};

void runs_cross_shards_of_both_kinds_and_threads_change_nothing() {
    const Temporary file(50000);
    std::vector<std::uint16_t> mapped(1000);
    for (std::size_t i = 0; i < mapped.size(); ++i) mapped[i] = static_cast<std::uint16_t>(50000 + i);
    const auto bytes = bytes_of(mapped);
    const TokenStore store(TokenType::uint16, {{nullptr, file.pooled(), 50000}, {nullptr, nullptr, 0}, {bytes.data(), nullptr, 1000}});
    std::mt19937 random(3);
    const std::size_t rows = 100;
    const std::size_t width = 4097;
    Numbers first, count, ends, places;
    for (std::size_t i = 0; i < rows; ++i) {
        std::int64_t left = width;
        for (int run = 0; run < 3; ++run) {
            count.push_back(static_cast<std::int64_t>(random() % static_cast<unsigned>(left + 1)));
            first.push_back(static_cast<std::int64_t>(random() % static_cast<unsigned>(51001 - count.back())));
            left -= count.back();
        }
        ends.push_back(static_cast<std::int64_t>(first.size()));
        places.push_back(static_cast<std::int64_t>((i * 37) % rows));
    }
    Numbers one(rows * width, -1), four(rows * width, -2);
    CHECK(!store.gather({first, count, ends, places}, {one, width, -9}, 1));
    CHECK(!store.gather({first, count, ends, places}, {four, width, -9}, 4));
    CHECK(one == four);
    for (std::size_t i = 0; i < rows; ++i) {
        Numbers expected;
        for (std::size_t run = 3 * i; run < 3 * i + 3; ++run) {
            for (std::int64_t k = 0; k < count[run]; ++k) expected.push_back(first[run] + k);
        }
        expected.resize(width, -9);
        const auto* row = one.data() + static_cast<std::size_t>(places[i]) * width;
        CHECK(std::equal(expected.begin(), expected.end(), row));
    }
}

void a_file_that_was_cut_is_told() {
    const Temporary file(1000);
    const TokenStore store(TokenType::uint16, {{nullptr, file.pooled(), 1000}});
    (void)file.pooled()->use();
    file.cut(1001);
    Numbers out(2 * 600, 0);
    const Numbers first{0, 450}, count{500, 150};
    const auto fault = store.gather({first, count, {}, {}}, {out, 600, 0}, 2);
    CHECK(fault && fault->shard == 0 && fault->byte == 1001 && fault->error == 0);
    const Temporary other(1000);
    other.cut(1001);
    const TokenStore changed(TokenType::uint16, {{nullptr, other.pooled(), 1000}});
    const auto stale = changed.gather({first, count, {}, {}}, {out, 600, 0}, 1);
    CHECK(stale && stale->byte == 0 && stale->error == ESTALE);
}

// Of four pages a cut takes the last two from under the map.
void a_mapped_file_that_was_cut_is_told() {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    const auto tokens = static_cast<std::int64_t>(2 * page);
    const Temporary file(static_cast<int>(tokens));
    const mdata::FileMap map(file.path().c_str());
    const auto* const bytes = reinterpret_cast<const std::byte*>(map.bytes().data());
    const std::vector<std::uint16_t> whole(100, 7);
    const TokenStore store(TokenType::uint16, {{reinterpret_cast<const std::byte*>(whole.data()), nullptr, 100}, {bytes, nullptr, tokens}});
    Numbers out(64 * 700, 0);
    const Numbers good{0, 100}, bad{0, 100 + tokens - 600}, counts{100, 600};
    CHECK(!store.gather({bad, counts, {}, {}}, {out, 700, 0}, 1));
    file.cut(static_cast<int>(2 * page));
    for (int again = 0; again < 3; ++again) {
        const auto fault = store.gather({bad, counts, {}, {}}, {out, 700, 0}, 1);
        CHECK(fault && fault->shard == 1 && fault->error == EIO);
        CHECK(fault && fault->byte >= 2 * tokens - 1200 && fault->byte < 2 * tokens);
        CHECK(!store.gather({good, counts, {}, {}}, {out, 700, 0}, 1));
        CHECK(out[0] == 7 && out[700] == 0 && out[701] == 1);
    }
    Numbers first(64, 100), count(64, 600);
    first[50] = bad[1];
    const auto fault = store.gather({first, count, {}, {}}, {out, 700, 0}, 3);
    CHECK(fault && fault->shard == 1 && fault->error == EIO);
    if (!check::kForks) return;  // a sanitizer has a handler of its own
    volatile const std::byte* const gone = bytes + 3 * page;  // nobody tells a guard
    for (const bool sent : {false, true}) {
        const pid_t child = ::fork();
        if (child == 0) ::_exit(sent ? ::raise(SIGBUS) : static_cast<int>(*gone));
        int status = 0;
        CHECK(::waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
    }
}

void what_does_not_fit_is_refused() {
    const std::vector<std::byte> bytes(100);
    const TokenStore store(TokenType::uint8, {{bytes.data(), nullptr, 100}});
    Numbers out(10 * 10);
    const auto read = [&](Numbers first, Numbers count, Numbers ends, Numbers places, std::size_t width = 10) {
        return store.gather({first, count, ends, places}, {out, width, 0}, 1);
    };
    CHECK(!read({90}, {10}, {}, {}));
    CHECK_THROWS(std::out_of_range, read({91}, {10}, {}, {}));
    CHECK_THROWS(std::out_of_range, read({-1}, {1}, {}, {}));
    CHECK_THROWS(std::out_of_range, read({0}, {-1}, {}, {}));
    CHECK_THROWS(std::out_of_range, read({INT64_MAX}, {INT64_MAX}, {}, {}));
    CHECK_THROWS(std::invalid_argument, read({0}, {11}, {}, {}));
    CHECK_THROWS(std::invalid_argument, read({0, 0}, {6, 5}, {2}, {}));
    CHECK_THROWS(std::invalid_argument, read({0, 0}, {6}, {}, {}));
    CHECK_THROWS(std::invalid_argument, read({0, 0}, {1, 1}, {1}, {}));
    CHECK_THROWS(std::invalid_argument, read({0, 0}, {1, 1}, {3, 2}, {}));
    CHECK_THROWS(std::out_of_range, read({0}, {1}, {}, {10}));
    CHECK_THROWS(std::out_of_range, read({0}, {1}, {}, {-1}));
    CHECK_THROWS(std::invalid_argument, read({0}, {1}, {}, {0, 1}));
    CHECK_THROWS(std::invalid_argument, read(Numbers(11), Numbers(11), {}, {}));
    CHECK_THROWS(std::invalid_argument, read({0}, {0}, {}, {}, 0));
    CHECK_THROWS(std::overflow_error, TokenStore(TokenType::uint8, {{nullptr, nullptr, INT64_MAX}}));
    CHECK_THROWS(std::overflow_error, TokenStore(TokenType::uint8, {{nullptr, nullptr, -1}}));
}

// Tables of documents of one sequence each, empty ones among them, in two shards.
struct Tables {
    std::vector<std::int32_t> lengths[2];
    Numbers pointers[2], boundaries[2];
    std::vector<std::byte> bytes[2][3];
    Numbers ends;  // of all documents, in tokens of both shards

    explicit Tables(std::mt19937& random, unsigned most = 40) {
        std::int64_t token = 0;
        for (int s = 0; s < 2; ++s) {
            const auto documents = random() % 300;
            std::int64_t inside = 0;
            boundaries[s].push_back(0);
            for (unsigned d = 0; d < documents; ++d) {
                const auto length = static_cast<std::int32_t>(random() % most);
                lengths[s].push_back(length);
                pointers[s].push_back(inside * 2);
                inside += length;
                ends.push_back(token + inside);
                boundaries[s].push_back(static_cast<std::int64_t>(d) + 1);
            }
            token += inside;
        }
    }

    mdata::SequenceIndex index() {
        std::vector<mdata::ShardTables> shards;
        for (int s = 0; s < 2; ++s) {
            bytes[s][0] = bytes_of(lengths[s], 1);
            bytes[s][1] = bytes_of(pointers[s], 3);
            bytes[s][2] = bytes_of(boundaries[s], 5);
            std::int64_t tokens = 0;
            for (const auto length : lengths[s]) tokens += length;
            shards.push_back({bytes[s][0].data() + 1, bytes[s][1].data() + 3, bytes[s][2].data() + 5,
                              static_cast<std::int64_t>(lengths[s].size()), static_cast<std::int64_t>(boundaries[s].size()) - 1, tokens});
        }
        return {2, std::move(shards)};
    }
};

void odd_sequences_are_counted_inside_of_their_document() {
    // Documents [2, 0, 1, 3] [0, 2] [] [1]; then a shard of [1] [] [1, 1].
    const std::vector<std::vector<std::vector<std::int32_t>>> shards{{{2, 0, 1, 3}, {0, 2}, {}, {1}}, {{1}, {}, {1, 1}}};
    std::vector<std::vector<std::int32_t>> lengths;
    std::vector<Numbers> pointers, boundaries;
    std::vector<std::uint8_t> expected;
    for (const auto& shard : shards) {
        lengths.emplace_back(), pointers.emplace_back(), boundaries.push_back({0});
        std::int64_t byte = 0;
        for (const auto& document : shard) {
            for (std::size_t i = 0; i < document.size(); ++i) {
                lengths.back().push_back(document[i]);
                pointers.back().push_back(byte);
                byte += 2 * document[i];
                expected.insert(expected.end(), static_cast<std::size_t>(document[i]), static_cast<std::uint8_t>(i % 2));
            }
            boundaries.back().push_back(static_cast<std::int64_t>(lengths.back().size()));
        }
    }
    const auto table = [](const auto& values) { return reinterpret_cast<const std::byte*>(values.data()); };
    std::vector<mdata::ShardTables> tables;
    for (std::size_t s = 0; s < shards.size(); ++s) {
        tables.push_back({table(lengths[s]), table(pointers[s]), table(boundaries[s]), static_cast<std::int64_t>(lengths[s].size()),
                          static_cast<std::int64_t>(boundaries[s].size()) - 1, s == 0 ? 9 : 3});
    }
    const mdata::SequenceIndex index(2, tables);
    const auto total = static_cast<std::int64_t>(expected.size());
    for (std::int64_t start = 0; start <= total; ++start) {
        for (std::int64_t stop = start; stop <= total; ++stop) {
            const std::vector<std::uint8_t> wanted(expected.begin() + start, expected.begin() + stop);
            CHECK(index.odd_sequences(Numbers{start}, Numbers{stop - start}) == wanted);
        }
    }
    CHECK_THROWS(std::out_of_range, index.odd_sequences(Numbers{0}, Numbers{total + 1}));
    pointers[0][1] = 1 << 20;
    CHECK_THROWS(mdata::IndexFault, index.odd_sequences(Numbers{0}, Numbers{total}));
    pointers[0][1] = 4;
    for (auto& boundary : boundaries[0]) boundary = 0;
    CHECK_THROWS(mdata::IndexFault, index.odd_sequences(Numbers{0}, Numbers{total}));
}

void cuts_are_the_starts_of_documents() {
    std::mt19937 random(5);
    for (int round = 0; round < 200; ++round) {
        Tables tables(random, round % 2 == 0 ? 40 : 2);
        const auto index = tables.index();
        const auto total = index.num_tokens();
        Numbers starts, counts;
        for (int i = 0; i < 20; ++i) {
            starts.push_back(static_cast<std::int64_t>(random() % static_cast<unsigned>(total + 1)));
            counts.push_back(static_cast<std::int64_t>(random() % static_cast<unsigned>(total - starts.back() + 1)));
        }
        const auto cuts = index.cuts(starts, counts);
        std::size_t at = 0;
        for (std::size_t i = 0; i < starts.size(); ++i) {
            std::int64_t last = 0;
            for (const std::int64_t end : tables.ends) {
                const std::int64_t place = end - starts[i];
                if (place <= last || place >= counts[i]) continue;
                CHECK(at < cuts.places.size() && cuts.places[at] == place);
                ++at;
                last = place;
            }
            CHECK(cuts.ends[i] == static_cast<std::int64_t>(at));
        }
        CHECK_THROWS(std::out_of_range, index.cuts(Numbers{0}, Numbers{total + 1}));
        CHECK_THROWS(std::out_of_range, index.cuts(Numbers{-1}, Numbers{0}));
    }
}

void pieces_are_parts_of_sequences() {
    std::mt19937 random(9);
    Tables tables(random);
    const auto index = tables.index();
    const auto number = static_cast<std::int32_t>(tables.ends.size());
    std::vector<std::int32_t> order{number - 1, 0, number / 2, 0};
    const auto length = [&](std::int32_t d) {
        const auto at = static_cast<std::size_t>(d);
        return tables.ends[at] - (d == 0 ? 0 : tables.ends[at - 1]);
    };
    const Numbers whole{0, 0, 3, length(0)};
    const auto runs = index.pieces(std::span<const std::int32_t>(order), whole, 0);
    CHECK(runs.ends == Numbers{4});
    for (std::size_t i = 0; i < 4; ++i) {
        CHECK(runs.count[i] == length(order[i]));
        CHECK(runs.first[i] + runs.count[i] == tables.ends[static_cast<std::size_t>(order[i])]);
    }
    const auto refused = [&](const Numbers& spans, std::int64_t extra) {
        CHECK_THROWS(std::out_of_range, index.pieces(std::span<const std::int32_t>(order), spans, extra));
    };
    refused(whole, 1);
    refused({0, 0, 4, 0}, 0);
    refused({-1, 0, 0, 0}, 0);
    refused({1, 0, 0, 0}, 0);
    refused({0, length(number - 1) + 1, 1, 0}, 0);
    refused({0, -1, 1, 0}, 0);
    order[1] = number;
    refused(whole, 0);
    order[1] = -1;
    refused(whole, 0);
}

void wrong_entries_are_told() {
    std::mt19937 random(9);
    for (const std::int64_t wrong : {INT64_MIN, std::int64_t{-2}, std::int64_t{1}, INT64_MAX, std::int64_t{1} << 40}) {
        Tables tables(random);
        tables.pointers[0][0] = wrong;
        CHECK_THROWS(mdata::IndexFault, tables.index().cuts(Numbers{5}, Numbers{50}));
        Numbers first(1), count(1);
        CHECK_THROWS(mdata::IndexFault, tables.index().documents(Numbers{0}, first, count));
        Tables other(random);
        other.lengths[0][0] = -1;
        const std::vector<std::int64_t> order{0};
        const std::vector<mdata::ShardTables> kept;
        CHECK_THROWS(mdata::IndexFault, other.index().pieces(std::span<const std::int64_t>(order), Numbers{0, 0, 0, 0}, 0));
        Tables third(random);
        third.boundaries[0][0] = wrong == 1 ? -1 : wrong;
        CHECK_THROWS(mdata::IndexFault, third.index().documents(Numbers{0}, first, count));
    }
}

void rows_are_finished_by_place_and_by_value() {
    Numbers text{9, 5, 0, 7, 5, 5};
    std::vector<float> loss(5, -1);
    Numbers positions(5, -1);
    const std::vector<std::int32_t> cuts{2, 3};
    mdata::finish_row({}, {text, 4, cuts, loss, positions});
    CHECK(loss == (std::vector<float>{1, 1, 1, 0, 0}));
    CHECK(positions == (Numbers{0, 1, 0, 0, 1}));
    mdata::finish_row({.pad = 5, .eod = 0, .mask_eod = true, .restart_at_eod = true}, {text, 6, {}, loss, positions});
    CHECK(loss == (std::vector<float>{0, 1, 0, 0, 0}));
    CHECK(positions == (Numbers{0, 1, 2, 0, 1}));
    CHECK(text == (Numbers{9, 0, 0, 7, 0, 0}));
}

void rows_end_to_end_are_one_list_of_documents() {
    const std::vector<std::int32_t> cuts{2, 2, 3, 0, 5};
    const auto found = mdata::cumulative_lengths(Numbers{3, 3, 5}, cuts, 5);
    CHECK(found.starts == (std::vector<std::int32_t>{0, 2, 3, 5, 10, 15}));
    CHECK(found.longest == 5);
    CHECK(mdata::cumulative_lengths({}, {}, 5).starts == (std::vector<std::int32_t>{0}));
    CHECK_THROWS(std::overflow_error, mdata::cumulative_lengths(Numbers{0, 0}, {}, 1 << 30));
    CHECK_THROWS(std::invalid_argument, mdata::cumulative_lengths(Numbers{2}, std::vector<std::int32_t>{3, 2}, 5));
    CHECK_THROWS(std::invalid_argument, mdata::cumulative_lengths(Numbers{1}, std::vector<std::int32_t>{6}, 5));
    CHECK_THROWS(std::invalid_argument, mdata::cumulative_lengths(Numbers{1}, {}, 5));
}

// Whole batches in one go are what the parts give one after the other.
void a_batch_of_the_native_order_is_its_parts() {
    std::mt19937 random(21);
    Tables tables(random);
    const auto index = tables.index();
    std::vector<std::uint16_t> tokens(static_cast<std::size_t>(index.num_tokens()));
    for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::uint16_t>(i);
    const auto bytes = bytes_of(tokens);
    const TokenStore store(TokenType::uint16, {{bytes.data(), nullptr, index.num_tokens()}});
    const std::int64_t inputs = 7;
    const mdata::Permutation permutation(static_cast<std::uint64_t>((index.num_tokens() - 3 - 1) / inputs), {1, 2});
    const Numbers samples{100, 103, 101, 105, 102};
    Numbers text(5 * 8, -1), positions(5 * 7, -1);
    std::vector<float> loss(5 * 7, -1);
    const mdata::RowArrays rows{text, 8, loss, positions};
    const auto read = mdata::read_native(store, &index, permutation, samples, {100, 3, 8}, {}, rows, 1);
    CHECK(!read.fault);
    Numbers starts, counts(5, inputs);
    for (std::size_t i = 0; i < 5; ++i) {
        starts.push_back(3 + inputs * static_cast<std::int64_t>(permutation.forward(static_cast<std::uint64_t>(samples[i] - 100))));
        for (std::size_t k = 0; k < 8; ++k) CHECK(text[8 * i + k] == starts[i] + static_cast<std::int64_t>(k));
    }
    const auto cuts = index.cuts(starts, counts);
    CHECK(read.documents.starts == mdata::cumulative_lengths(cuts.ends, cuts.places, inputs).starts);
    for (std::size_t i = 0; i < 5 * 7; ++i) {
        const bool begins = std::find(read.documents.starts.begin(), read.documents.starts.end(), static_cast<std::int32_t>(i)) !=
                            read.documents.starts.end();
        CHECK(positions[i] == (begins ? 0 : positions[i - 1] + 1));
        CHECK(loss[i] == 1.0F);
    }
    CHECK_THROWS(std::out_of_range, mdata::read_native(store, &index, permutation, Numbers{99}, {100, 3, 8}, {}, rows, 1));
}

// Rows of one token give the whole permuted stream; it has every token of the range once, and blocks keep theirs.
void blocks_permute_their_sequences() {
    std::mt19937 random(13);
    for (int round = 0; round < 100; ++round) {
        Tables tables(random, 12);
        const auto index = tables.index();
        const auto block = static_cast<std::int64_t>(1 + random() % 9);
        const mdata::BlockShuffle blocks(index, 0, index.num_sequences(), block);
        const mdata::Key128 key{random(), random()};
        Numbers starts, ones(static_cast<std::size_t>(index.num_tokens()), 1);
        for (std::int64_t token = 0; token < index.num_tokens(); ++token) starts.push_back(token);
        auto tokens = blocks.runs(key, starts, ones, 3).first;
        const auto whole = blocks.runs(key, Numbers{0}, Numbers{index.num_tokens()}, 1);
        Numbers walked;
        for (std::size_t run = 0; run < whole.first.size(); ++run) {
            for (std::int64_t i = 0; i < whole.count[run]; ++i) walked.push_back(whole.first[run] + i);
        }
        CHECK(tokens == walked);
        for (std::int64_t first = 0; first < index.num_sequences(); first += block) {
            const std::int64_t last = std::min(first + block, index.num_sequences());
            const auto from = static_cast<std::ptrdiff_t>(index.first_token(first));
            const auto to = static_cast<std::ptrdiff_t>(index.first_token(last));
            std::sort(tokens.begin() + from, tokens.begin() + to);
            for (std::int64_t sequence = first; sequence < last; ++sequence) {
                if (index.first_token(sequence) == index.first_token(sequence + 1)) continue;
                const auto [place, count] = blocks.place(key, sequence);
                CHECK(walked[static_cast<std::size_t>(place)] == index.first_token(sequence));
                CHECK(count == index.first_token(sequence + 1) - index.first_token(sequence));
            }
        }
        CHECK(tokens == starts);
        CHECK_THROWS(std::out_of_range, blocks.runs(key, Numbers{1}, Numbers{index.num_tokens()}, 1));
        CHECK_THROWS(std::out_of_range, blocks.place(key, index.num_sequences()));
    }
}

// As of a loader's thread that reads while another loader forks its workers.
void a_child_permutes_whatever_its_parents_threads_did() {
    std::mt19937 random(14);
    Tables tables(random, 12);
    const auto index = tables.index();
    const mdata::BlockShuffle blocks(index, 0, index.num_sequences(), 1);
    const Numbers starts(100, 0), ones(100, 1);
    const mdata::Key128 key{1, 2};
    const auto expected = blocks.runs(key, starts, ones, 1).first;
    const auto run = [&] { return blocks.runs(key, starts, ones, 1).first; };
    CHECK(check::in_children(300, run, [&] { return run() == expected; }));
}

}  // namespace

int main() {
    widens<std::uint8_t>(TokenType::uint8);
    widens<std::int8_t>(TokenType::int8);
    widens<std::uint16_t>(TokenType::uint16);
    widens<std::int16_t>(TokenType::int16);
    widens<std::int32_t>(TokenType::int32);
    widens<std::int64_t>(TokenType::int64);
    runs_cross_shards_of_both_kinds_and_threads_change_nothing();
    a_file_that_was_cut_is_told();
    a_mapped_file_that_was_cut_is_told();
    what_does_not_fit_is_refused();
    odd_sequences_are_counted_inside_of_their_document();
    cuts_are_the_starts_of_documents();
    pieces_are_parts_of_sequences();
    wrong_entries_are_told();
    rows_are_finished_by_place_and_by_value();
    rows_end_to_end_are_one_list_of_documents();
    a_batch_of_the_native_order_is_its_parts();
    blocks_permute_their_sequences();
    a_child_permutes_whatever_its_parents_threads_did();
    return check::finish("gather");
}
