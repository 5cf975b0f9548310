/* A data pipeline of DALI's shape, as a library for ctypes: threads and streams of its own, a runtime inside that is not
 * seen, the driver by dlsym and cuGetProcAddress. A producer copies a batch to the device and waits for its stream; the
 * consumer waits for a batch on a condition variable, or in the driver, in its own thread.
 */
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace {
constexpr size_t kBytes = 1 << 16;
constexpr unsigned kQueued = 2;

struct Driver {
  int (*init)(unsigned);
  int (*device_get)(int *, int);
  int (*retain)(void **, int);
  int (*set_current)(void *);
  int (*stream_create)(void **, unsigned);
  int (*copy)(unsigned long long, const void *, size_t, void *);
  int (*synchronize)(void *);
  int (*allocate)(unsigned long long *, size_t);
  int (*pin)(void **, size_t, unsigned);
};

template <class F> void fetch(void *library, const char *name, F &out) {
  using Look = int (*)(const char *, void **, int, unsigned long long, int *);
  static Look look = reinterpret_cast<Look>(dlsym(library, "cuGetProcAddress_v2"));
  void *found = nullptr;
  look(name, &found, 12000, 0, nullptr);
  out = reinterpret_cast<F>(found);
}

class Pipeline {
public:
  Pipeline(unsigned producers, unsigned period_us) : period_(period_us) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    fetch(library, "cuInit", driver_.init);
    fetch(library, "cuDeviceGet", driver_.device_get);
    fetch(library, "cuDevicePrimaryCtxRetain", driver_.retain);
    fetch(library, "cuCtxSetCurrent", driver_.set_current);
    fetch(library, "cuStreamCreate", driver_.stream_create);
    fetch(library, "cuMemcpyHtoDAsync", driver_.copy);
    fetch(library, "cuStreamSynchronize", driver_.synchronize);
    fetch(library, "cuMemAlloc", driver_.allocate);
    fetch(library, "cuMemHostAlloc", driver_.pin);
    int device = 0;
    driver_.init(0);
    driver_.device_get(&device, 0);
    driver_.retain(&context_, device);
    prepare(own_);
    for (unsigned i = 0; i < producers; i++) threads_.emplace_back([this] { produce(); });
  }

  /* A batch, waited for on a condition variable. */
  void next() {
    std::unique_lock<std::mutex> lock(mutex_);
    batch_.wait(lock, [this] { return ready_ > 0; });
    ready_--;
    room_.notify_one();
  }

  /* A batch whose copy the caller waits for in the driver. */
  int next_in_driver() { return copy_and_wait(own_); }

  unsigned long copies() const { return copies_; }

private:
  struct Lane {
    void *stream, *host;
    unsigned long long memory;
  };

  void prepare(Lane &lane) {
    driver_.set_current(context_);
    driver_.stream_create(&lane.stream, 1);
    driver_.allocate(&lane.memory, kBytes);
    driver_.pin(&lane.host, kBytes, 0);
  }

  int copy_and_wait(const Lane &lane) {
    int error = driver_.copy(lane.memory, lane.host, kBytes, lane.stream);
    return error ? error : driver_.synchronize(lane.stream);
  }

  void produce() {
    Lane lane{};
    pthread_setname_np(pthread_self(), "decode");
    prepare(lane);
    for (;;) {
      std::this_thread::sleep_for(std::chrono::microseconds(period_));
      copies_++;
      copy_and_wait(lane);
      std::unique_lock<std::mutex> lock(mutex_);
      room_.wait(lock, [this] { return ready_ < kQueued; });
      ready_++;
      batch_.notify_one();
    }
  }

  Driver driver_{};
  Lane own_{};
  void *context_ = nullptr;
  unsigned period_;
  std::mutex mutex_;
  std::condition_variable batch_, room_;
  unsigned ready_ = 0;
  std::atomic<unsigned long> copies_{0};
  std::vector<std::thread> threads_;
};

Pipeline *pipeline; /* until the process ends, with its threads */
} // namespace

extern "C" {
void pipeline_open(unsigned producers, unsigned period_us) {
  pipeline = new Pipeline(producers, period_us);
}
void pipeline_next(void) {
  pipeline->next();
}
int pipeline_next_in_driver(void) {
  return pipeline->next_in_driver();
}
unsigned long pipeline_copies(void) {
  return pipeline->copies();
}
}
