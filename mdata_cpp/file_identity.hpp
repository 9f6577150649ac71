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

inline FileIdentity identity_of(const struct stat& facts) {
    constexpr std::int64_t kSecond = 1'000'000'000;
    return {facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtim.tv_sec * kSecond + facts.st_mtim.tv_nsec};
}

}  // namespace mdata
