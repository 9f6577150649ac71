// WordPiece (mdata_cpp/wordpiece.hpp) on any bytes: nothing is read outside, and the ids are those of a plain search.
//
// The first byte chooses the treatment and the prefix, the second the longest word; then follow entries, added tokens
// and the text, with a byte FF between. Words come from the fast normalizer (that they are the library's is tested from
// Python); tries, short words, the memo and the search for added tokens are compared with a map. Each text is encoded
// twice, so that the memo is met full. Built with libFuzzer where clang is, else with fuzz/driver.cpp.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "input.hpp"
#include "wordpiece.hpp"

namespace {

using namespace mdata::wordpiece;
using Ids = std::vector<std::int32_t>;
using Map = std::map<std::string, std::int32_t, std::less<>>;

constexpr std::int32_t kUnknown = 1'000'000;
constexpr const char* kPrefixes[] = {"##", "", "a", "\xC3\xA9"};

std::vector<Item> items_of(const Map& map) {
    std::vector<Item> items;
    for (const auto& [text, value] : map) items.push_back({text, value});
    return items;
}

// One for each of the sixteen treatments; under the sanitizers making one takes a second.
const std::shared_ptr<const Normalizer>& normalizer_of(Treatment t) {
    static std::shared_ptr<const Normalizer> made[16];
    auto& one = made[t.clean | t.cjk << 1 | t.strip << 2 | t.lower << 3];
    if (!one) one = std::make_shared<const Normalizer>(t);
    return one;
}

void put_pieces(const Map& entries, const Settings& settings, std::string_view word, Ids& ids) {
    Ids found;
    for (std::size_t at = 0; at < word.size();) {
        std::size_t size = word.size() - at;
        auto entry = entries.end();
        for (; size > 0; --size) {
            entry = entries.find((at == 0 ? "" : settings.prefix) + std::string(word.substr(at, size)));
            if (entry != entries.end()) break;
        }
        if (size == 0) {
            ids.push_back(kUnknown);
            return;
        }
        found.push_back(entry->second);
        at += size;
    }
    ids.insert(ids.end(), found.begin(), found.end());
}

// False: the text is left.
bool plain(const Map& entries, const Map& added, const Settings& settings, std::string_view text, Ids& ids) {
    const Normalizer& normalizer = *normalizer_of(settings.treatment);
    Word word(settings.most_chars);
    const auto part = [&](std::string_view piece) {
        return normalizer.words(piece, word, [&](const Word& one) {
            if (one.too_long()) ids.push_back(kUnknown);
            else put_pieces(entries, settings, {one.data(), one.size()}, ids);
        });
    };
    std::size_t begin = 0;
    for (std::size_t at = 0; at < text.size();) {
        const auto token = std::max_element(added.begin(), added.end(), [&](const auto& a, const auto& b) {
            const auto size = [&](const auto& one) { return text.substr(at).starts_with(one.first) ? one.first.size() : 0; };
            return size(a) < size(b);
        });
        if (token == added.end() || token->first.empty() || !text.substr(at).starts_with(token->first)) {
            ++at;
            continue;
        }
        if (token->second >= 0) {
            if (!part(text.substr(begin, at - begin))) return false;
            ids.push_back(token->second);
            begin = at + token->first.size();
        }
        at += token->first.size();
    }
    return part(text.substr(begin));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size < 2) return 0;
    const std::uint8_t choice = data[0];
    const Settings settings{kPrefixes[choice >> 4 & 3], data[1], kUnknown,
                            {(choice & 1) != 0, (choice & 2) != 0, (choice & 4) != 0, (choice & 8) != 0}};
    Map entries, added;
    std::size_t at = 2;
    std::string text;
    for (std::int32_t number = 0; at < size; ++number) {
        const std::size_t end = static_cast<std::size_t>(std::find(data + at, data + size, 0xFF) - data);
        text.assign(data + at, data + end);
        at = std::min(end + 1, size);
        if (end == size) break;
        if (number % 4 == 3) added[text] = number % 8 == 3 ? number : -1;
        else entries[text] = number;
    }
    const Encoder encoder(items_of(entries), items_of(added), settings, normalizer_of(settings.treatment));
    Ids expected{7};
    const bool taken = plain(entries, added, settings, text, expected);
    if (!taken) expected.clear();
    // Buffers of exactly that size, so that a sanitizer sees a byte too far.
    const std::vector<char> bytes(text.begin(), text.end());
    const std::string_view same(bytes.data(), bytes.size());
    const Batch batch = encoder.encode(std::vector{same, same}, Ids{7}, {});
    REQUIRE(batch.left.size() == (taken ? 0U : 2U));
    REQUIRE(batch.ids.size() == 2 * expected.size());
    REQUIRE(std::equal(expected.begin(), expected.end(), batch.ids.begin()));
    REQUIRE(std::equal(expected.begin(), expected.end(), batch.ids.begin() + static_cast<std::ptrdiff_t>(expected.size())));
    return 0;
}
