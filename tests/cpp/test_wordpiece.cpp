// Words and ids of a small vocabulary, words at the limit, added tokens, marks in order, and bytes that are no text:
// under the sanitizers nothing is read behind its end. Equality with the library is tested from Python.
#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "check.hpp"
#include "forks.hpp"
#include "wordpiece.hpp"

namespace {

using namespace mdata::wordpiece;
using Ids = std::vector<std::int32_t>;
using Words = std::vector<std::string>;

constexpr std::int32_t kUnknown = 0;
const std::vector<Item> kVocabulary = {
    {"[UNK]", 0},  {"the", 1},    {"##s", 2},        {"a", 3}, {"##a", 4}, {"##ab", 5}, {"ab", 6},
    {"", 7},       {"##", 8},     {"caf\xC3\xA9", 9}, {"!", 10}, {"\xE4\xB8\xAD", 11},
    {"seventeen letters", 12},    {"abababababababababab", 13},  // the first can never be a word, the second is long
};
const std::vector<Item> kAdded = {{"[CLS]", 20}, {"[CLS]s", 21}, {"<a>", -1}, {"a>b", 22}};
constexpr Treatment kLower{true, true, true, true};
constexpr Treatment kCased{true, true, false, false};

Encoder encoder(Treatment treatment = kLower, std::size_t most_chars = 20) {
    return {kVocabulary, kAdded, {"##", most_chars, kUnknown, treatment}};
}

Ids ids(const Encoder& encoder, std::string_view text) { return encoder.encode(std::vector{text}, {}, {}).ids; }

void entries() {
    const Encoder lower = encoder(), cased = encoder(kCased);
    CHECK((ids(lower, "The thes a!") == Ids{1, 1, 2, 3, 10}));
    CHECK((ids(cased, "The thes") == Ids{0, 1, 2}));
    CHECK((ids(lower, "aab aaba abc") == Ids{3, 5, 3, 5, 4, 0}));
    CHECK((ids(lower, "aab aab sa aab sa") == Ids{3, 5, 3, 5, 0, 3, 5, 0}));
    CHECK((ids(lower, "caf\xC3\xA9") == Ids{0}));
    CHECK((ids(cased, "caf\xC3\xA9") == Ids{9}));
    CHECK((ids(cased, "abababababababababab") == Ids{13}));
    CHECK((ids(lower, "a\xE4\xB8\xADthe") == Ids{3, 11, 1}));
    CHECK(ids(lower, "").empty());
    CHECK(ids(lower, " \n\t\xC2\x85").empty());
}

void lengths() {
    CHECK((ids(encoder(kLower, 3), "aaa aaaa \xC3\xA9") == Ids{3, 4, 4, 0, 0}));
    CHECK((ids(encoder(kLower, 0), "a !") == Ids{0, 0}));
    CHECK((ids(encoder(), std::string(1'000'000, 'a')) == Ids{0}));
    CHECK((ids(encoder(kLower, 1'000'000), std::string(1'000'000, 'a')).size() == 1'000'000));
    std::string marks;
    for (int i = 0; i < 100'000; ++i) marks += "\xE3\x80\xAE";  // U+302E stays and is ordered
    CHECK((ids(encoder(), marks) == Ids{0}));
}

void added() {
    const Encoder lower = encoder();
    CHECK((ids(lower, "[CLS]the[CLS]ss[CLS") == Ids{20, 1, 21, 0, 0, 0}));
    CHECK((ids(lower, "<a>b") == Ids{0, 3, 0, 0}));  // what is left as text hides the token that begins in it
    CHECK((ids(lower, "<a >a>b") == Ids{0, 3, 0, 22}));
    const std::vector<std::string_view> texts{"the", "", "the"};
    const Batch batch = lower.encode(texts, Ids{30}, Ids{31, 32});
    CHECK((batch.ids == Ids{30, 1, 31, 32, 30, 31, 32, 30, 1, 31, 32}));
    CHECK((batch.lengths == std::vector<std::int64_t>{4, 3, 4}));
    CHECK(batch.left.empty());
}

void left() {
    const std::vector<std::string_view> texts{"a", "a \xCD\xB8 a", "a"};  // U+0378 has no meaning yet
    const Batch batch = encoder().encode(texts, Ids{30}, {});
    CHECK((batch.ids == Ids{30, 3, 30, 3}));
    CHECK((batch.lengths == std::vector<std::int64_t>{2, 0, 2}));
    CHECK((batch.left == std::vector<std::int64_t>{1}));
    CHECK(encoder(kCased).encode(texts, {}, {}).left.empty());
}

void normalized() {
    const Encoder lower = encoder();
    const auto words = [&](std::string_view text) {
        Words found;
        CHECK(lower.words(text, found));
        return found;
    };
    CHECK((words("E\xCC\x81\xC3\x89 \xEA\xB0\x81") == Words{"ee", "\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8"}));
    CHECK((words("x.\xE3\x80\x82y_z") == Words{"x", ".", "\xE3\x80\x82", "y", "_", "z"}));
    // U+302E (224) and U+1BF2 (9) change places; U+0301 between them goes; U+200B is dropped before.
    CHECK((words("a\xE3\x80\xAE\xCC\x81\xE2\x80\x8B\xE1\xAF\xB2") == Words{"a\xE1\xAF\xB2\xE3\x80\xAE"}));
    // U+226E is a sign with a mark that goes; U+037E becomes a semicolon.
    CHECK((words("a\xE2\x89\xAE" "b\xCD\xBE") == Words{"a", "<", "b", ";"}));
    Words none;
    CHECK(!lower.words("\xCD\xB8", none));
}

void any_bytes() {
    std::mt19937 random(7);
    const Encoder lower = encoder(), cased = encoder(kCased);
    for (int round = 0; round < 2000; ++round) {
        // A buffer of exactly that size, so that a sanitizer sees a byte too far.
        std::vector<char> bytes(random() % 40);
        for (char& byte : bytes) byte = static_cast<char>(random() % 3 ? random() % 256 : 0xE0 + random() % 32);
        const std::string_view text(bytes.data(), bytes.size());
        const Batch batch = lower.encode(std::vector{text}, {}, {});
        CHECK(batch.lengths[0] == static_cast<std::int64_t>(batch.ids.size()));
        CHECK(cased.encode(std::vector{text}, {}, {}).lengths.size() == 1);
    }
}

void tables() {
    const std::vector<Item> twice{{"ab", 1}, {"a", 2}, {"ab", 3}, {std::string_view("a\0", 2), 4}};
    CHECK(Trie(twice).longest("abc", 3).value == 3);
    CHECK(Trie(twice).longest("acb", 3).size == 1);
    CHECK(Trie(twice).longest("b", 1).size == 0);
    CHECK(Trie({}).longest("b", 1).size == 0);
    const std::vector<Item> bytes = {{"a", 1}, {"b", 2}, {"c", 3}, {"ab", 4}, {"abca", 5}};
    Ids longest;
    append_longest(Trie(bytes), "abcbab", longest);
    CHECK((longest == Ids{4, 3, 2, 4}));
    const char padded[16] = {'a', 'b', 'c'};
    CHECK(ShortWords(twice).find(padded, 2) == 3);
    CHECK(ShortWords(twice).find(padded, 3) == ShortWords::kNone);
    const char zero[16] = {'a'};
    CHECK(ShortWords(twice).find(zero, 1) == 2);
    CHECK(ShortWords(twice).find(zero, 2) == 4);
}

// Far more words than a memo has slots: each is found as it was put last, or not at all.
void memo() {
    Memo memo;
    const auto word_of = [](int number, char* data) {
        std::string text = std::to_string(number) + std::string(static_cast<std::size_t>(number % 25), 'x');
        text.resize(1 + static_cast<std::size_t>(number) % Memo::kMostBytes, '\0');
        std::copy(text.begin(), text.end(), data);
        return text.size();
    };
    int known = 0;
    for (int round = 0; round < 2; ++round) {
        for (int number = 0; number < 40'000; ++number) {
            char data[Memo::kMostBytes] = {};
            const std::size_t size = word_of(number, data);
            Memo::Place place = memo.find(data, size);
            // Several numbers may be spelled alike: a word's ids are made of its bytes.
            std::uint32_t sum = static_cast<std::uint32_t>(size);
            for (const char byte : data) sum = sum * 31 + static_cast<unsigned char>(byte);
            const Ids expected((sum & 7) % 7 + 1, static_cast<std::int32_t>(sum & 0xFFFFFF));
            if (place.known()) CHECK(std::equal(expected.begin(), expected.end(), place.ids().begin(), place.ids().end()));
            else place.put(expected);
            known += place.known();
        }
    }
    CHECK(known > 1000);
    char data[Memo::kMostBytes] = {'q'};
    memo.find(data, 1).put(Ids(8, 1));
    CHECK(!memo.find(data, 1).known());
}

// As of a training process that tokenizes in a thread while a loader forks its workers.
void a_child_encodes_whatever_its_parents_threads_did() {
    const std::vector<Item> vocabulary{{"[UNK]", 0}, {"a", 1}, {"##b", 2}};
    const Encoder encoder(vocabulary, {}, Settings{"##", 100, 0, {}});
    const std::vector<std::string_view> texts(2, "ab a");
    const auto expected = encoder.encode(texts, {}, {}).ids;
    CHECK(expected.size() > 1);
    const auto encode = [&] { return encoder.encode(texts, {}, {}).ids; };
    CHECK(check::in_children(300, encode, [&] { return encode() == expected; }));
}

}  // namespace

int main() {
    entries();
    lengths();
    added();
    left();
    normalized();
    any_bytes();
    tables();
    memo();
    a_child_encodes_whatever_its_parents_threads_did();
    return check::finish("wordpiece");
}
