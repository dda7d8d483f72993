#include "common.h"

#include <sys/mman.h>

namespace vllm {

std::string& last_error() {
  static thread_local std::string text;
  return text;
}

static constexpr size_t kHuge = size_t{2} << 20;

Buffer::Buffer(size_t bytes, bool huge) {
  if (bytes == 0) return;
  huge = huge && bytes >= kHuge;
  // With huge pages the start is moved up to a boundary of 2 MB: mapped with slack, which is given back at once.
  const size_t wanted = round_up(static_cast<int64_t>(bytes), huge ? static_cast<int64_t>(kHuge) : 4096);
  const size_t slack = huge ? kHuge : 0;
  void* raw = mmap(nullptr, wanted + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) throw Error("out of memory: cannot map " + std::to_string(wanted) + " bytes");
  char* start = static_cast<char*>(raw);
  if (huge) {
    char* aligned = reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(start), static_cast<int64_t>(kHuge)));
    if (aligned > start) munmap(start, aligned - start);
    const size_t tail = (start + wanted + slack) - (aligned + wanted);
    if (tail > 0) munmap(aligned + wanted, tail);
    start = aligned;
#ifdef MADV_HUGEPAGE
    madvise(start, wanted, MADV_HUGEPAGE);
#endif
  }
  data_ = start;
  size_ = wanted;
}

Buffer::~Buffer() {
  if (data_ != nullptr) munmap(data_, size_);
}

void Buffer::reserve(size_t bytes) {
  if (bytes <= size_) return;
  Buffer bigger(bytes + bytes / 4);
  swap(bigger);
}

}  // namespace vllm

VLLM_EXPORT const char* vllm_last_error() { return vllm::last_error().c_str(); }
VLLM_EXPORT const char* vllm_isa() { return VLLM_ISA_NAME; }
