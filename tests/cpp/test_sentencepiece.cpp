// mdata_cpp/sentencepiece.hpp: texts prepared, words joined short and long against the rule itself, words remembered and
// forgotten, and any bytes at all without harm. Python's tests compare with the library.
#include "sentencepiece.hpp"

#include <random>
#include <set>

#include "check.hpp"
#include "far_text.hpp"
#include "forks.hpp"

using namespace mdata::sp;

namespace {

std::mt19937 draw(7);

const std::vector<std::string> kLetters = {"a", "b", " ", "\xc3\xa9", "z", "\xe4\xb8\xad"};

std::size_t below(std::size_t limit) { return draw() % limit; }

std::string prepared(const TextRules& rules, std::string_view text) {
    std::string out = "left over";
    Preparer(rules).prepare(text, out);
    return out;
}

// A double array by hand: "a" becomes "xy", "b" becomes "  ", "bc" becomes "", "de" becomes "R", "f" and byte C3 "S".
std::string small_charsmap() {
    std::vector<std::uint32_t> units(256, 0xFFFFFFFF & ~(1U << 31));
    const auto offset = [](std::uint32_t to) { return to << 10; };
    const auto node = [&](std::uint32_t at, char label, bool leaf, std::uint32_t children) {
        units[at] = static_cast<unsigned char>(label) | (leaf ? 1U << 8 : 0) | offset(at ^ children);
    };
    units[0] = offset(1);
    node(1 ^ 'a', 'a', true, 4);
    units[4] = 1U << 31 | 0;
    node(1 ^ 'b', 'b', true, 8);
    units[8] = 1U << 31 | 3;
    node(8 ^ 'c', 'c', true, 16);
    units[16] = 1U << 31 | 6;
    node(1 ^ 'd', 'd', false, 32);
    node(32 ^ 'e', 'e', true, 48);
    units[48] = 1U << 31 | 7;
    node(1 ^ 'f', 'f', false, 128);
    node(128 ^ 0xC3, '\xc3', true, 50);
    units[50] = 1U << 31 | 9;
    std::string out(4, '\0');
    const auto bytes = static_cast<std::uint32_t>(4 * units.size());
    std::memcpy(out.data(), &bytes, 4);
    out.append(reinterpret_cast<const char*>(units.data()), bytes);
    return out + std::string("xy\0  \0\0R\0S\0", 11);
}

void test_preparing() {
    CHECK(prepared({"", {}, true, false, false}, "a\xe2\x96\x81 b") == " a  b");
    CHECK(prepared({"", {}, true, false, true}, "a") == "a ");
    CHECK(prepared({"", {}, false, false, false}, "") == "" && prepared({"", {}, true, false, true}, "") == "");
    CHECK(prepared({"", {}, true, true, false}, "  a   b  ") == " a b");
    CHECK(prepared({"", {}, true, true, false}, "  \xe2\x96\x81 ") == "");
    CHECK(prepared({"", {}, true, true, true}, " ") == "");
    CHECK(prepared({"", {"  "}, true, true, false}, "a  b") == " a  b");
    const std::string rules = small_charsmap();
    CHECK(prepared({rules, {}, false, false, false}, "abcbd") == "xy  d");
    CHECK(prepared({rules, {}, false, true, false}, "bab d") == "xy  d");
    CHECK(prepared({rules, {"ab"}, false, false, false}, "abab") == "abab");
    CHECK(prepared({rules, {}, false, true, false}, "ddedf f\xc3 df") == "dRdf S df");
    CHECK(!Charsmap(rules).keeps('d') && Charsmap(rules).keeps('f'));
    CHECK(!Charsmap(rules).keeps('a') && !Charsmap(rules).keeps('b') && Charsmap(rules).keeps('c'));
    CHECK(Charsmap("").keeps('a'));
    CHECK_THROWS(std::invalid_argument, Charsmap("abc"));
    CHECK_THROWS(std::invalid_argument, Charsmap(rules.substr(0, 300)));
}

// Rules and texts of any bytes.
void test_damage() {
    for (int round = 0; round < 300; ++round) {
        std::string rules = small_charsmap();
        for (std::size_t n = below(200); n > 0; --n) rules[4 + below(rules.size() - 4)] = static_cast<char>(draw());
        TextRules facts{rules, {}, true, round % 2 == 0, round % 3 == 0};
        if (round % 5 == 0) facts.raw = {"\xff", "ab"};
        const Preparer preparer(facts);
        std::string text, out;
        for (std::size_t n = below(40); n > 0; --n)
            text.push_back(static_cast<char>(round % 4 == 0 ? 'a' + below(4) : draw()));
        preparer.prepare(text, out);
        CHECK(out.size() <= (text.size() + 1) * (rules.size() + 3));
    }
}

std::vector<Piece> random_pieces() {
    std::set<std::string> texts;
    for (std::size_t n = 1 + below(20); n > 0; --n) {
        std::string text;
        for (std::size_t k = 1 + below(5); k > 0; --k) text += kLetters[below(4)];
        texts.insert(text);
    }
    std::vector<Piece> pieces;
    for (const std::string& text : texts)
        pieces.push_back({text, static_cast<float>(below(3)), static_cast<std::int32_t>(pieces.size())});
    return pieces;
}

using Spans = std::vector<std::string>;

// The rule itself.
Spans joined(const std::vector<Piece>& pieces, std::string_view text) {
    Spans symbols;
    for (std::size_t at = 0, size = 0; at < text.size(); at += size) {
        first_char(text.substr(at), size);
        symbols.emplace_back(text.substr(at, size));
    }
    while (true) {
        const Piece* best = nullptr;
        std::size_t place = 0;
        for (std::size_t i = 0; i + 1 < symbols.size(); ++i)
            for (const Piece& piece : pieces)
                if (piece.text == symbols[i] + symbols[i + 1] && (best == nullptr || piece.score > best->score)) {
                    best = &piece;
                    place = i;
                }
        if (best == nullptr) return symbols;
        symbols[place] = best->text;
        symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(place) + 1);
    }
}

void test_merging() {
    for (int round = 0; round < 400; ++round) {
        const std::vector<Piece> pieces = random_pieces();
        Merges merges(pieces);
        std::string word;
        // Short words and long ones take different ways.
        for (std::size_t n = 1 + below(round % 2 == 0 ? 12 : 120); n > 0; --n) {
            word += kLetters[below(round % 3 == 0 ? 6 : 2)];
        }
        Spans found;
        merges.encode(word, [&](std::int32_t id, std::size_t start, std::size_t stop) {
            found.push_back(word.substr(start, stop - start));
            const bool is_piece = id != Merges::kNoPiece;
            CHECK(!is_piece || pieces[static_cast<std::size_t>(id)].text == found.back());
        });
        CHECK(found == joined(pieces, word));
    }
    const Merges none({});
    CHECK(!none.may_join('a', 'b') && !none.may_join(0xC3A9, 'b'));
}

void test_words() {
    Words words(2, 4000);
    std::vector<std::pair<std::string, std::vector<std::int32_t>>> known;
    std::size_t found_again = 0;
    for (int round = 0; round < 3000; ++round) {
        std::string word;
        for (std::size_t n = 1 + below(round % 3 == 0 ? Words::kLongest : 17); n > 0; --n)
            word.push_back(static_cast<char>('a' + below(3)));
        const std::size_t size = word.size();
        word.append(Words::kPadding, 'x');
        const std::string_view view(word.data(), size);
        std::vector<std::int32_t> ids(1 + below(round % 4 == 0 ? size : std::min<std::size_t>(size, 4)));
        for (std::int32_t& id : ids) id = static_cast<std::int32_t>(draw() >> 1);
        std::vector<std::int32_t> out(size + Words::kSpare);
        const Words::Key key = Words::key_of(view);
        if (words.find(key, view, out.data()) != 0) continue;
        words.insert(key, view, ids);
        CHECK(words.find(key, view, out.data()) == ids.size() && std::equal(ids.begin(), ids.end(), out.begin()));
        known.emplace_back(word, ids);
        // What is still there is right.
        for (int k = 0; k < 5; ++k) {
            const std::string& old = known[below(known.size())].first;
            const std::string_view part(old.data(), old.size() - Words::kPadding);
            std::vector<std::int32_t> again(Words::kLongest + Words::kSpare);
            const std::size_t count = words.find(Words::key_of(part), part, again.data());
            found_again += count != 0;
            const auto same = [&](const auto& one) { return one.first == old; };
            const auto& last = std::find_if(known.rbegin(), known.rend(), same)->second;
            CHECK(count == 0 || (count == last.size() && std::equal(last.begin(), last.end(), again.begin())));
        }
    }
    CHECK(found_again > 100);
}

std::vector<std::int32_t> ids_of(BpeEncoder& encoder, std::string_view text) {
    Ids ids;
    encoder.encode(text, ids);
    return {ids.data(), ids.data() + ids.size()};
}

void test_encoding() {
    Facts facts;
    facts.rules.remove_extra_blanks = false;
    facts.rules.raw = {"<x>"};
    facts.pieces = {{" ", 0, 1}, {"a", 0, 2}, {"b", 0, 3}, {" a", 2, 4}, {"ab", 1, 5}};
    facts.user_pieces = {{"<x>", 0, 6}, {"<x>a", 0, 7}};
    BpeEncoder plain(std::make_shared<const Model>(facts));
    using V = std::vector<std::int32_t>;
    for (int again = 0; again < 2; ++again) {
        CHECK(ids_of(plain, "ab") == V({4, 3}) && ids_of(plain, "bab") == V({1, 3, 5}));
        CHECK(ids_of(plain, "") == V{} && ids_of(plain, "zzaz<z") == V({1, 0, 2, 0}));
        CHECK(ids_of(plain, "z<x>z<x>ab") == V({1, 0, 6, 0, 7, 3}));
    }
    facts.user_pieces = {{"ba", 0, 8}};
    facts.pieces.push_back({"bab", 3, 9});
    BpeEncoder parted(std::make_shared<const Model>(facts));
    CHECK(ids_of(parted, "babaab") == V({1, 8, 8, 5}) && ids_of(parted, "aba") == V({4, 8}));
    facts.byte_ids.resize(256);
    for (int byte = 0; byte < 256; ++byte) facts.byte_ids[static_cast<std::size_t>(byte)] = 100 + byte;
    facts.pieces.erase(facts.pieces.begin());
    BpeEncoder bytes(std::make_shared<const Model>(facts));
    CHECK(ids_of(bytes, "bz") == V({100 + 0xE2, 100 + 0x96, 100 + 0x81, 3, 100 + 'z'}));
    // Any bytes, and more blanks than there are bytes of text to make room for.
    std::string text(1000, ' ');
    CHECK(ids_of(bytes, text).size() == 3003);
    for (int round = 0; round < 200; ++round) {
        text.clear();
        for (std::size_t n = below(60); n > 0; --n) text.push_back(static_cast<char>(draw()));
        CHECK(ids_of(bytes, text) == ids_of(bytes, text));
        ids_of(plain, text);
    }
}

// As of a training process that tokenizes in a thread while a loader forks its workers.
void test_children() {
    Facts facts;
    facts.pieces = {{" ", 0, 1}, {"a", 0, 2}, {"b", 0, 3}, {"ab", 1, 4}};
    const Encoder encoder(facts);
    const std::vector<std::string_view> texts = {"ab a", "", "abz"};
    const auto encode = [&] {
        std::vector<std::int64_t> lengths(texts.size());
        const auto ids = encoder.encode(texts, lengths);
        return std::pair(ids, lengths);
    };
    const auto expected = encode();
    CHECK(expected.first == std::vector<std::int32_t>({1, 4, 1, 2, 1, 4, 0}));
    CHECK(expected.second == std::vector<std::int64_t>({4, 0, 3}));
    CHECK(check::in_children(300, encode, [&] { return encode() == expected; }));
}

// Symbols have numbers of 32 bits: a longer word is refused before any of it is read.
void test_far_words() {
    const Merges merges({{"a", 0, 1}, {"b", 0, 2}, {"ab", 1, 3}});
    const check::FarText word((std::size_t{1} << 32) - 2, "");
    CHECK_THROWS(std::overflow_error, merges.encode(word.view(), [](std::int32_t, std::size_t, std::size_t) {}));
}

void test_ids() {
    Ids ids;
    for (int round = 0; round < 3; ++round) {
        for (std::int32_t k = 0; k < 5000; ++k) {
            std::int32_t* end = ids.room(3);
            *end++ = k;
            ids.end_at(end);
        }
        CHECK(ids.size() == 5000 && ids.data()[0] == 0 && ids.data()[4999] == 4999);
        ids.clear();
        CHECK(ids.size() == 0);
    }
}

}  // namespace

int main() {
    test_preparing();
    test_damage();
    test_merging();
    test_words();
    test_encoding();
    test_children();
    test_far_words();
    test_ids();
    return check::finish("sentencepiece");
}
