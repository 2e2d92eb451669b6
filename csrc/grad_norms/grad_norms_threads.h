// Sums of squares on all of torch's threads, which begin while the list of gradients is still read.
#pragma once

#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <thread>
#include <vector>

#include "../common/torch_util.h"
#include "grad_norms.h"
#include "grad_norms_plan.h"

namespace camox {

// The division of the gradients into pieces and work items, which p points to.
struct Plan {
  std::vector<camox_grad_piece> piece;
  std::vector<int64_t> item;

  explicit Plan(camox_grad_norms_params& p) {
    p.pieces = camox_grad_norms_pieces(&p);
    piece.resize(p.pieces), item.resize(p.pieces + 1);
    p.items = camox_grad_norms_plan(&p, piece.data(), item.data());
    p.piece = piece.data(), p.item = item.data();
  }
};

// The gradients of a call. Small ones are added up while the list is still read, each by the thread that claims it; large ones
// in pieces when the list is known. Who adds changes no bit of a sum.
class GradList {
 public:
  explicit GradList(size_t most) : most_(most), grads_(new camox_grad[most]), squares_(new double[most]) {}

  size_t most() const { return most_; }

  // Called by one thread.
  void add(const camox_grad& grad) {
    grads_[known_.load(std::memory_order_relaxed)] = grad;
    known_.fetch_add(1, std::memory_order_release);
  }
  void complete() { complete_.store(true, std::memory_order_release); }

  // Called by any number of threads, which return when the list is complete and every small gradient claimed.
  void add_up_small() {
    for (;;) {
      const size_t i = claimed_.fetch_add(1, std::memory_order_relaxed);
      while (known_.load(std::memory_order_acquire) <= i) {
        if (complete_.load(std::memory_order_acquire) && known_.load(std::memory_order_acquire) <= i) return;
        std::this_thread::yield();
      }
      if (is_small(grads_[i])) squares_[i] = camox_grad_norms_of_run(&grads_[i]);
    }
  }

  // After all of that: the list, for what checks it and for finish.
  void put_into(camox_grad_norms_params& p) const {
    p.count = static_cast<int64_t>(known_.load()), p.grads = grads_.get(), p.squares = squares_.get();
  }

  // Writes p.norms.
  void finish(camox_grad_norms_params& p) {
    add_up_large();
    std::vector<double> sum(p.groups);
    camox_grad_norms_finish(&p, sum.data());
  }

 private:
  static bool is_small(const camox_grad& grad) { return grad.elements <= CAMOX_GRAD_ITEM; }

  void add_up_large() {
    std::vector<camox_grad> large;
    std::copy_if(grads_.get(), grads_.get() + known_.load(), std::back_inserter(large),
                 [](const camox_grad& grad) { return !is_small(grad); });
    if (large.empty()) return;
    camox_grad_norms_params p{};
    p.count = static_cast<int64_t>(large.size()), p.grads = large.data();
    const Plan plan(p);
    std::vector<double> partial(p.pieces), squares(p.count);
    p.partial = partial.data(), p.squares = squares.data();
    run(camox_grad_norms_sums, p, p.items, CAMOX_GRAD_ITEM);
    camox_grad_norms_gather(&p);
    for (size_t i = 0, next = 0; next < large.size(); ++i)
      if (!is_small(grads_[i])) squares_[i] = squares[next++];
  }

  const size_t most_;
  std::unique_ptr<camox_grad[]> grads_;
  std::unique_ptr<double[]> squares_;
  std::atomic<size_t> known_{0}, claimed_{0};
  std::atomic<bool> complete_{false};
};

// Calls read(), which fills and completes the list and takes part, on this thread, which torch gives a share of the work on every
// kind of pool; the other threads add up what is small. read must not throw: they would wait for the rest of the list.
template <class Read>
void add_up_while_read(GradList& list, Read read) {
  constexpr int64_t grads_worth_a_thread = 16;
  const std::thread::id reader = std::this_thread::get_id();
  const auto take_part = [&](int64_t, int64_t) {
    if (std::this_thread::get_id() == reader)
      read();
    else
      list.add_up_small();
  };
  torch::stable::parallel_for(0, static_cast<int64_t>(list.most()), grads_worth_a_thread, take_part);
}

}  // namespace camox
