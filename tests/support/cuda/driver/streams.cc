/* Streams: each has a thread that runs its operations in order, behind those that it has to await.

   The legacy stream of a context and its blocking streams await each other, as in CUDA. An operation that
   fails loses the context: what is queued does not run, and all later calls fail. */
#include "fake.h"

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <unistd.h>

struct Operation {
    std::function<void(Context &)> run;
    std::vector<Mark> after;
};

struct Stream {
    Context &context;
    bool is_blocking;
    std::deque<Operation> queue;
    uint64_t num_queued = 0, num_done = 0;
    bool is_closed = false;
};

namespace {
struct Event {
    Mark mark;
};

using StreamPtr = std::shared_ptr<Stream>;
std::mutex &queue_mutex = *new std::mutex;
std::condition_variable &changed = *new std::condition_variable;
auto &streams = *new std::map<void *, StreamPtr>;
auto &events = *new std::map<void *, std::shared_ptr<Event>>;
void *const LEGACY = reinterpret_cast<void *>(1);
constexpr auto POLL = std::chrono::microseconds(50);
constexpr int ANY_BIT = 2, EQUAL = 1, AT_LEAST = 0;

bool is_reached(const Mark &mark) { return !mark.stream || mark.stream->num_done >= mark.number; }

void run_operation(Context &context, Operation &operation) {
    if (long milliseconds = fault("slow", 100))
        usleep(1000 * milliseconds);
    if (context.lost)
        return;
    try {
        operation.run(context);
    } catch (CUresult code) {
        context.lost = code;
    }
}

void work(StreamPtr stream) {
    std::unique_lock<std::mutex> locked(queue_mutex);
    for (;;) {
        changed.wait(locked, [&] {
            return stream->queue.empty()
                ? stream->is_closed
                : std::all_of(stream->queue[0].after.begin(), stream->queue[0].after.end(), is_reached);
        });
        if (stream->queue.empty())
            return;
        auto operation = std::move(stream->queue.front());
        stream->queue.pop_front();
        locked.unlock();
        run_operation(stream->context, operation);
        locked.lock();
        stream->num_done++;
        changed.notify_all();
    }
}

/* A thread that gets no signals of the process. */
StreamPtr start_stream(Context &context, bool is_blocking) {
    auto stream = StreamPtr(new Stream{context, is_blocking, {}});
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread(work, stream).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return stream;
}

StreamPtr stream_at(void *handle) { /* with the lock */
    if (handle && handle != LEGACY) {
        auto found = streams.find(handle);
        check(found != streams.end(), INVALID_HANDLE);
        return found->second;
    }
    auto &context = current();
    if (!context.legacy)
        context.legacy = start_stream(context, true);
    return context.legacy;
}

std::vector<Mark> awaited_by(const Stream &stream) {
    std::vector<Mark> after;
    auto await = [&](const StreamPtr &other) { after.push_back({other, other->num_queued}); };
    bool is_legacy = &stream == stream.context.legacy.get();
    if (!is_legacy && stream.is_blocking && stream.context.legacy)
        await(stream.context.legacy);
    for (auto &[handle, other] : streams)
        if (is_legacy && other->is_blocking && &other->context == &stream.context)
            await(other);
    return after;
}

std::vector<StreamPtr> streams_of(Context &context) { /* with the lock */
    std::vector<StreamPtr> found;
    if (context.legacy)
        found.push_back(context.legacy);
    for (auto &[handle, stream] : streams)
        if (&stream->context == &context)
            found.push_back(stream);
    return found;
}

std::vector<Mark> marks_of(Context &context) {
    std::lock_guard<std::mutex> locked(queue_mutex);
    std::vector<Mark> marks;
    for (auto &stream : streams_of(context))
        marks.push_back({stream, stream->num_queued});
    return marks;
}

void close_stream(Stream &stream) { /* with the lock */
    stream.is_closed = true;
    changed.notify_all();
}

std::shared_ptr<Event> event_at(void *handle) {
    std::lock_guard<std::mutex> locked(queue_mutex);
    auto found = events.find(handle);
    check(found != events.end(), INVALID_HANDLE);
    return found->second;
}

void check_word(uint64_t at) {
    std::shared_lock<std::shared_mutex> locked(memory_lock);
    check(at % sizeof(uint64_t) == 0 && is_covered(at, sizeof(uint64_t)));
}

/* With the lock of the memory, so that it stays mapped. */
std::atomic<uint64_t> &word_at(Context &context, uint64_t at, bool writes) {
    check(can_reach(context, at, sizeof(uint64_t), writes, false), ILLEGAL_ADDRESS);
    return *static_cast<std::atomic<uint64_t> *>(reinterpret_cast<void *>(at));
}
}

Mark enqueue(void *handle, std::function<void(Context &)> run, std::vector<Mark> after) {
    current();
    std::lock_guard<std::mutex> locked(queue_mutex);
    auto stream = stream_at(handle);
    auto awaited = awaited_by(*stream);
    awaited.insert(awaited.end(), after.begin(), after.end());
    stream->queue.push_back({std::move(run), std::move(awaited)});
    changed.notify_all();
    return {stream, ++stream->num_queued};
}

Context &context_of_stream(void *handle) {
    std::lock_guard<std::mutex> locked(queue_mutex);
    return stream_at(handle)->context;
}

void wait_for(const Mark &mark) {
    std::unique_lock<std::mutex> locked(queue_mutex);
    changed.wait(locked, [&] { return is_reached(mark); });
    if (CUresult lost = mark.stream ? mark.stream->context.lost.load() : SUCCESS)
        fail(lost);
}

void synchronize(Context &context) {
    for (auto &mark : marks_of(context))
        wait_for(mark);
}

/* What is queued does not run. */
void drop_streams(Context &context) {
    std::unique_lock<std::mutex> locked(queue_mutex);
    for (auto &stream : streams_of(context)) {
        stream->num_done += stream->queue.size();
        stream->queue.clear();
        close_stream(*stream);
        changed.wait(locked, [&] { return stream->num_done == stream->num_queued; });
        streams.erase(stream.get());
    }
    context.legacy = nullptr;
}

API cuStreamCreate(void **handle, unsigned flags) try {
    auto &context = current();
    check(flags <= NON_BLOCKING);
    std::lock_guard<std::mutex> locked(queue_mutex);
    auto stream = start_stream(context, flags != NON_BLOCKING);
    streams[*handle = stream.get()] = stream;
    return SUCCESS;
} FAILS

/* What is queued still runs. */
API cuStreamDestroy_v2(void *handle) try {
    current();
    std::lock_guard<std::mutex> locked(queue_mutex);
    check(handle && handle != LEGACY, INVALID_HANDLE);
    close_stream(*stream_at(handle));
    streams.erase(handle);
    return SUCCESS;
} FAILS

API cuStreamSynchronize(void *handle) try {
    wait_for(enqueue(handle, [](Context &) {}));
    return SUCCESS;
} FAILS

API cuStreamQuery(void *handle) try {
    current();
    std::lock_guard<std::mutex> locked(queue_mutex);
    auto stream = stream_at(handle);
    return is_reached({stream, stream->num_queued}) ? SUCCESS : NOT_READY;
} FAILS

API cuStreamWaitEvent(void *handle, void *event, unsigned) try {
    enqueue(handle, [](Context &) {}, {event_at(event)->mark});
    return SUCCESS;
} FAILS

API cuStreamAddCallback(void *handle, void (*call)(void *, CUresult, void *), void *given, unsigned) try {
    enqueue(handle, [=](Context &) { call(handle, SUCCESS, given); });
    return SUCCESS;
} FAILS

API cuLaunchHostFunc(void *handle, void (*call)(void *), void *given) try {
    enqueue(handle, [=](Context &) { call(given); });
    return SUCCESS;
} FAILS

API cuStreamWriteValue64_v2(void *handle, CUdeviceptr at, uint64_t value, unsigned) try {
    check_word(at);
    enqueue(handle, [=](Context &context) {
        std::shared_lock<std::shared_mutex> locked(memory_lock);
        word_at(context, at, true) = value;
    });
    return SUCCESS;
} FAILS

API cuStreamWaitValue64_v2(void *handle, CUdeviceptr at, uint64_t value, unsigned flags) try {
    check(flags <= ANY_BIT);
    check_word(at);
    enqueue(handle, [=](Context &context) {
        for (bool is_there = false; !is_there && context.retained; usleep(POLL.count())) {
            std::shared_lock<std::shared_mutex> locked(memory_lock);
            uint64_t found = word_at(context, at, false);
            is_there = flags == AT_LEAST ? int64_t(found - value) >= 0
                : flags == EQUAL ? found == value : (found & value) != 0;
        }
    });
    return SUCCESS;
} FAILS

API cuEventCreate(void **handle, unsigned) try {
    current();
    std::lock_guard<std::mutex> locked(queue_mutex);
    auto event = std::make_shared<Event>();
    events[*handle = event.get()] = event;
    return SUCCESS;
} FAILS

API cuEventDestroy_v2(void *handle) try {
    event_at(handle);
    std::lock_guard<std::mutex> locked(queue_mutex);
    events.erase(handle);
    return SUCCESS;
} FAILS

API cuEventRecord(void *handle, void *stream) try {
    auto event = event_at(handle);
    auto mark = enqueue(stream, [](Context &) {});
    std::lock_guard<std::mutex> locked(queue_mutex);
    event->mark = mark;
    return SUCCESS;
} FAILS

API cuEventQuery(void *handle) try {
    check_not_lost();
    auto event = event_at(handle);
    std::lock_guard<std::mutex> locked(queue_mutex);
    return is_reached(event->mark) ? SUCCESS : NOT_READY;
} FAILS

API cuEventSynchronize(void *handle) try {
    wait_for(event_at(handle)->mark);
    return SUCCESS;
} FAILS

/* What a test does to a stream: a kernel that takes this long. */
API fake_cuda_delay(void *stream, unsigned milliseconds) try {
    enqueue(stream, [=](Context &) { usleep(1000 * milliseconds); });
    return SUCCESS;
} FAILS
