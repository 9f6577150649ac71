// The identity of a file, which distinguishes it from a later file with the same name: device, inode, size and time of
// change.
#pragma once

#include <sys/stat.h>

#include <cstdint>

namespace mdata {

struct FileIdentity {
    std::uint64_t device = 0;
    std::uint64_t inode = 0;
    std::int64_t size = 0;
    std::int64_t modified_ns = 0;

    bool operator==(const FileIdentity&) const = default;
};

// A time that does not fit 64 bits, after 2262, wraps.
inline FileIdentity identity_of(const struct stat& facts) {
    constexpr std::uint64_t kSecond = 1'000'000'000;
    const std::uint64_t modified = static_cast<std::uint64_t>(facts.st_mtim.tv_sec) * kSecond + static_cast<std::uint64_t>(facts.st_mtim.tv_nsec);
    return {facts.st_dev, facts.st_ino, facts.st_size, static_cast<std::int64_t>(modified)};
}

}  // namespace mdata
