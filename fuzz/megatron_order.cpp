// The sample index of Megatron's order (mdata_cpp/megatron_order.hpp) over lengths and orders of any content.
//
// Each row is the place of its token, found by a walk over all documents in 128 bits; rows behind the last document stay
// as they are; documents cut in blocks anywhere, as threads have them, give the same rows. Of negative lengths, which
// readers refuse, only that nothing is read or written outside.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "input.hpp"
#include "megatron_order.hpp"

namespace {

constexpr std::int64_t kLongest = std::int64_t{1} << 61;

template <typename Place, typename Row>
void fill(const std::vector<std::int32_t>& lengths, const std::vector<Place>& order, ByteSource& input) {
    const std::int64_t q = std::max<std::int64_t>(1, input.number() & (kLongest - 1));
    const std::int64_t extra = input.byte() & 1;
    const std::int64_t last = input.byte() % 40;
    std::vector<std::byte> bytes(1 + lengths.size() * sizeof(std::int32_t));  // as in an .idx, nothing is aligned
    if (!lengths.empty()) std::memcpy(bytes.data() + 1, lengths.data(), bytes.size() - 1);
    const mdata::Lengths table{std::span<const std::byte>(bytes).subspan(1)};
    std::vector<Row> rows(static_cast<std::size_t>(2 * last + 2), -7);
    const mdata::SampleIndex<Row> index{table, q, extra, last, rows};
    mdata::fill_sample_index(index, std::span<const Place>(order), 1 + input.byte() % 3);

    std::vector<Row> blocks(rows.size(), -7);
    blocks[0] = blocks[1] = 0;
    const mdata::SampleIndex<Row> again{table, q, extra, last, blocks};
    std::int64_t before = 0;
    for (std::size_t first = 0; first < order.size();) {
        const std::size_t stop = std::min(order.size(), first + 1 + input.byte() % 8);
        mdata::fill_block(again, std::span<const Place>(order), first, stop, before);
        for (; first < stop; ++first) before += lengths[static_cast<std::size_t>(order[first])];
    }
    if (std::any_of(lengths.begin(), lengths.end(), [](std::int32_t length) { return length < 0; })) return;
    REQUIRE(rows == blocks);
    REQUIRE(rows[0] == 0 && rows[1] == 0);
    std::size_t d = 0;
    __int128 start = 0;
    for (std::int64_t k = 1; k <= last; ++k) {
        const __int128 token = static_cast<__int128>(k) * q + extra - 1;
        while (d < order.size() && token >= start + lengths[static_cast<std::size_t>(order[d])]) {
            start += lengths[static_cast<std::size_t>(order[d++])];
        }
        const bool there = d < order.size();
        REQUIRE(rows[static_cast<std::size_t>(2 * k)] == (there ? static_cast<Row>(d) : -7));
        REQUIRE(rows[static_cast<std::size_t>(2 * k + 1)] == (there ? static_cast<Row>(token + 1 - extra - start) : -7));
    }
}

template <typename Place>
std::vector<Place> order_of(ByteSource& input, std::size_t num_lengths) {
    std::vector<Place> order(num_lengths == 0 ? 0 : input.byte() % 60);
    for (auto& place : order) place = static_cast<Place>(input.byte() % num_lengths);
    return order;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    ByteSource input(data, size);
    const std::uint8_t kind = input.byte();
    std::vector<std::int32_t> lengths(input.byte() % 30);
    for (auto& length : lengths) {
        length = static_cast<std::int32_t>(input.number());
        if ((kind & 4) == 0) length &= 0x7FFFFFFF;
    }
    switch (kind & 3) {
        case 0: fill<std::int64_t, std::int64_t>(lengths, order_of<std::int64_t>(input, lengths.size()), input); break;
        case 1: fill<std::int32_t, std::int64_t>(lengths, order_of<std::int32_t>(input, lengths.size()), input); break;
        default: fill<std::int32_t, std::int32_t>(lengths, order_of<std::int32_t>(input, lengths.size()), input);
    }
    return 0;
}
