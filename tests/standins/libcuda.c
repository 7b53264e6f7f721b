/* A stand-in for libcuda.so.1 on machines without a GPU: real processes run the real code against it.

   allocation   a memory file; export is dup, import is dup, map is mmap: device addresses are host addresses
   stream       a thread that copies in order; streams overtake each other
   event        ends when its stream has come to it

   It is compiled against NVIDIA's own cuda.h, so that the compiler checks every signature. It is stricter than it is
   fast: a call without a current context, an unmapped range or a handle used twice is an error.

   Set by environment variables (STANDIN_CUDA_NAME, read in cuInit) or standin_cuda_set("NAME", "value"):
     DEVICES    comma-separated, a device each: 32 hexadecimal digits of its UUID; `mig:` before them = a slice of a GPU
     NO_PEER    1 = no device reaches another's memory
     NO_SHARING 1 = no allocation can be exported
     MEMORY     bytes that this process may allocate
     DELAY_US   a copy pauses half-way for a random time up to this
     HOLD       a path: while that file exists, copies stop half-way
     FAIL       CALL:N:CODE = the N-th call of CALL from now on returns CODE; `copy:N:CODE` = the N-th copy fails while
                it runs, and from then on every call returns CODE, as after a fault on a GPU
   standin_cuda_live("handles" | "ranges" | "mappings" | "streams" | "events" | "contexts") = how many there are now. */

#define _GNU_SOURCE
#include <cuda.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define GRANULE (1 << 16)
#define PREFIX "standin-cuda-"
#define MAX_DEVICES 8
#define EXPORTED __attribute__((visibility("default")))

struct device { unsigned char uuid[16]; int is_slice; int retained; };
struct allocation { int fd; size_t size; unsigned char gpu[16]; int is_live; };
struct range { char *at; size_t size; int is_mapped; unsigned char gpu[16]; struct range *next; };
struct operation {
    char *to; const char *from; size_t size; CUevent event; CUhostFn call; void *data; struct operation *next;
};
struct CUstream_st { pthread_t thread; struct operation *first, **last; int busy, ending; };
struct CUevent_st { int pending, is_destroyed; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct device devices[MAX_DEVICES];
static int num_devices, is_ready, no_peer, no_sharing, num_handles, num_streams, num_events, fail_after;
static CUresult fail_with, lost;
static char fail_call[64], hold[512];
static long delay_us;
static size_t memory_left = (size_t)1 << 40;
static struct range *ranges;
static __thread CUcontext contexts[16];
static __thread int depth;

static const char *const settings[] = {"DEVICES", "NO_PEER", "NO_SHARING", "MEMORY", "DELAY_US", "HOLD", "FAIL"};

static void set_devices(const char *value) {
    num_devices = 0;
    for (const char *at = value; *at && num_devices < MAX_DEVICES; num_devices++) {
        struct device *device = &devices[num_devices];
        device->is_slice = !strncmp(at, "mig:", 4);
        at += device->is_slice ? 4 : 0;
        for (int i = 0; i < 16; i++, at += 2) sscanf(at, "%2hhx", &device->uuid[i]);
        at += *at == ',';
    }
}

EXPORTED void standin_cuda_set(const char *name, const char *value) {
    pthread_mutex_lock(&lock);
    if (!strcmp(name, "DEVICES")) set_devices(value);
    if (!strcmp(name, "NO_PEER")) no_peer = atoi(value);
    if (!strcmp(name, "NO_SHARING")) no_sharing = atoi(value);
    if (!strcmp(name, "MEMORY")) memory_left = strtoull(value, NULL, 10);
    if (!strcmp(name, "DELAY_US")) delay_us = atol(value);
    if (!strcmp(name, "HOLD")) snprintf(hold, sizeof hold, "%s", value);
    if (!strcmp(name, "FAIL")) {
        int code = 0;
        fail_call[0] = 0;
        fail_after = 0;
        sscanf(value, "%63[^:]:%d:%d", fail_call, &fail_after, &code);
        fail_with = (CUresult)code;
        lost = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
}

EXPORTED int standin_cuda_live(const char *what) {
    int count = 0;
    pthread_mutex_lock(&lock);
    for (struct range *range = ranges; range; range = range->next) {
        count += !strcmp(what, "ranges") || (!strcmp(what, "mappings") && range->is_mapped);
    }
    for (int i = 0; i < num_devices && !strcmp(what, "contexts"); i++) count += devices[i].retained;
    if (!strcmp(what, "handles")) count = num_handles;
    if (!strcmp(what, "streams")) count = num_streams;
    if (!strcmp(what, "events")) count = num_events;
    pthread_mutex_unlock(&lock);
    return count;
}

/* What every call asks first; the lock is held from here on if it returns CUDA_SUCCESS. */
static CUresult enter(const char *call) {
    pthread_mutex_lock(&lock);
    CUresult status = is_ready ? lost : CUDA_ERROR_NOT_INITIALIZED;
    if (!status && !strcmp(call, fail_call) && --fail_after == 0) status = fail_with;
    if (status) pthread_mutex_unlock(&lock);
    return status;
}

static CUresult leave(CUresult status) {
    pthread_mutex_unlock(&lock);
    return status;
}

#define ENTER() do { CUresult refused = enter(__func__); if (refused) return refused; } while (0)
#define CHECK(condition, error) do { if (!(condition)) return leave(error); } while (0)
#define CHECK_CONTEXT() CHECK(depth > 0, CUDA_ERROR_INVALID_CONTEXT)
#define CHECK_DEVICE(device) CHECK((device) >= 0 && (device) < num_devices, CUDA_ERROR_INVALID_DEVICE)

EXPORTED CUresult cuGetErrorName(CUresult error, const char **text) {
    switch (error) {
    case CUDA_ERROR_INVALID_VALUE: *text = "CUDA_ERROR_INVALID_VALUE"; break;
    case CUDA_ERROR_OUT_OF_MEMORY: *text = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case CUDA_ERROR_NO_DEVICE: *text = "CUDA_ERROR_NO_DEVICE"; break;
    case CUDA_ERROR_INVALID_DEVICE: *text = "CUDA_ERROR_INVALID_DEVICE"; break;
    case CUDA_ERROR_INVALID_CONTEXT: *text = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case CUDA_ERROR_INVALID_HANDLE: *text = "CUDA_ERROR_INVALID_HANDLE"; break;
    case CUDA_ERROR_OPERATING_SYSTEM: *text = "CUDA_ERROR_OPERATING_SYSTEM"; break;
    case CUDA_ERROR_ILLEGAL_ADDRESS: *text = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    case CUDA_ERROR_LAUNCH_FAILED: *text = "CUDA_ERROR_LAUNCH_FAILED"; break;
    case CUDA_ERROR_NOT_SUPPORTED: *text = "CUDA_ERROR_NOT_SUPPORTED"; break;
    case CUDA_ERROR_NOT_INITIALIZED: *text = "CUDA_ERROR_NOT_INITIALIZED"; break;
    default: *text = NULL; return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuGetErrorString(CUresult error, const char **text) {
    (void)error;
    *text = "as the stand-in was told, or found";
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuInit(unsigned int flags) {
    if (!is_ready) {
        standin_cuda_set("DEVICES", "000102030405060708090a0b0c0d0e0f");
        for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
            char name[64];
            snprintf(name, sizeof name, "STANDIN_CUDA_%s", settings[i]);
            if (getenv(name)) standin_cuda_set(settings[i], getenv(name));
        }
        srand((unsigned)getpid());
        is_ready = 1;
    }
    ENTER();
    CHECK(num_devices, CUDA_ERROR_NO_DEVICE);
    return leave(flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
}

EXPORTED CUresult cuDeviceGetCount(int *count) {
    ENTER();
    *count = num_devices;
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER();
    CHECK_DEVICE(ordinal);
    *device = ordinal;
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuDeviceGetName(char *name, int len, CUdevice device) {
    ENTER();
    CHECK_DEVICE(device);
    snprintf(name, (size_t)len, "Stand-in%s", devices[device].is_slice ? " MIG 1g.5gb" : "");
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER();
    CHECK_DEVICE(device);
    memcpy(uuid->bytes, devices[device].uuid, 16);
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    ENTER();
    CHECK_DEVICE(device);
    *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        || (attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED && !no_sharing);
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    ENTER();
    CHECK_DEVICE(device);
    CHECK_DEVICE(peer);
    *can = device != peer && !no_peer;
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER();
    CHECK_DEVICE(device);
    devices[device].retained++;
    *context = (CUcontext)&devices[device];
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER();
    CHECK_DEVICE(device);
    CHECK(devices[device].retained > 0, CUDA_ERROR_INVALID_CONTEXT);
    devices[device].retained--;
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuCtxPushCurrent(CUcontext context) {
    ENTER();
    CHECK(context && ((struct device *)context)->retained > 0, CUDA_ERROR_INVALID_CONTEXT);
    CHECK(depth < 16, CUDA_ERROR_INVALID_VALUE);
    contexts[depth++] = context;
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuCtxPopCurrent(CUcontext *context) {
    ENTER();
    CHECK_CONTEXT();
    *context = contexts[--depth];
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuMemGetAllocationGranularity(
    size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option) {
    ENTER();
    CHECK(option == CU_MEM_ALLOC_GRANULARITY_MINIMUM && prop->type == CU_MEM_ALLOCATION_TYPE_PINNED,
          CUDA_ERROR_INVALID_VALUE);
    *granularity = GRANULE;
    return leave(CUDA_SUCCESS);
}

static CUresult new_handle(CUmemGenericAllocationHandle *handle, int fd, size_t size, const unsigned char *gpu) {
    struct allocation *allocation = malloc(sizeof *allocation);
    *allocation = (struct allocation){.fd = fd, .size = size, .is_live = 1};
    memcpy(allocation->gpu, gpu, 16);
    *handle = (CUmemGenericAllocationHandle)(size_t)allocation;
    num_handles++;
    return CUDA_SUCCESS;
}

static CUresult of_errno(void) {
    return errno == ENOMEM ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_OPERATING_SYSTEM;
}

EXPORTED CUresult cuMemCreate(
    CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags) {
    ENTER();
    CHECK(!flags && size && size % GRANULE == 0 && prop->type == CU_MEM_ALLOCATION_TYPE_PINNED
          && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && !prop->win32HandleMetaData, CUDA_ERROR_INVALID_VALUE);
    CHECK_DEVICE(prop->location.id);
    CHECK(prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && !no_sharing,
          CUDA_ERROR_NOT_SUPPORTED);
    CHECK(size <= memory_left, CUDA_ERROR_OUT_OF_MEMORY);
    const unsigned char *gpu = devices[prop->location.id].uuid;
    char name[64] = PREFIX; /* says whose memory it is to who imports it */
    for (int i = 0; i < 16; i++) sprintf(name + strlen(name), "%02x", gpu[i]);
    int fd = memfd_create(name, MFD_CLOEXEC);
    CHECK(fd >= 0, of_errno());
    if (ftruncate(fd, (off_t)size)) {
        close(fd);
        return leave(of_errno());
    }
    memory_left -= size;
    return leave(new_handle(handle, fd, size, gpu));
}

static struct allocation *allocation_of(CUmemGenericAllocationHandle handle) {
    struct allocation *allocation = (struct allocation *)(size_t)handle;
    return allocation && allocation->is_live ? allocation : NULL;
}

EXPORTED CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER();
    struct allocation *allocation = allocation_of(handle);
    CHECK(allocation, CUDA_ERROR_INVALID_VALUE);
    close(allocation->fd);
    allocation->is_live = 0; /* never freed, so that a second release is found out */
    num_handles--;
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuMemExportToShareableHandle(
    void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags) {
    ENTER();
    struct allocation *allocation = allocation_of(handle);
    CHECK(allocation && !flags && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE);
    int fd = fcntl(allocation->fd, F_DUPFD_CLOEXEC, 0);
    CHECK(fd >= 0, of_errno());
    *(int *)shareable = fd;
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuMemImportFromShareableHandle(
    CUmemGenericAllocationHandle *handle, void *shareable, CUmemAllocationHandleType type) {
    ENTER();
    struct stat status;
    int given = (int)(long)shareable;
    char link[64], name[128] = "", *at = name;
    unsigned char gpu[16];
    snprintf(link, sizeof link, "/proc/self/fd/%d", given);
    CHECK(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && readlink(link, name, sizeof name - 1) > 0
          && (at = strstr(name, PREFIX)) && !fstat(given, &status), CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < 16; i++) sscanf(at + strlen(PREFIX) + 2 * i, "%2hhx", &gpu[i]);
    int fd = fcntl(given, F_DUPFD_CLOEXEC, 0);
    CHECK(fd >= 0, of_errno());
    return leave(new_handle(handle, fd, (size_t)status.st_size, gpu));
}

EXPORTED CUresult cuMemAddressReserve(
    CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
    ENTER();
    CHECK(size && size % GRANULE == 0 && !alignment && !wanted && !flags, CUDA_ERROR_INVALID_VALUE);
    char *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(at != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    struct range *range = malloc(sizeof *range);
    *range = (struct range){.at = at, .size = size, .next = ranges};
    ranges = range;
    *address = (CUdeviceptr)(size_t)at;
    return leave(CUDA_SUCCESS);
}

static struct range **range_at(CUdeviceptr address, size_t size, int is_mapped) {
    for (struct range **range = &ranges; *range; range = &(*range)->next) {
        if ((CUdeviceptr)(size_t)(*range)->at == address && (*range)->size == size && (*range)->is_mapped == is_mapped) {
            return range;
        }
    }
    return NULL;
}

EXPORTED CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    ENTER();
    struct range **found = range_at(address, size, 0);
    CHECK(found, CUDA_ERROR_INVALID_VALUE);
    struct range *range = *found;
    *found = range->next;
    munmap(range->at, range->size);
    free(range);
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuMemMap(
    CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    ENTER();
    struct range **range = range_at(address, size, 0);
    struct allocation *allocation = allocation_of(handle);
    CHECK(range && allocation && !offset && !flags && size <= allocation->size, CUDA_ERROR_INVALID_VALUE);
    CHECK(mmap((*range)->at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, allocation->fd, 0) != MAP_FAILED, of_errno());
    madvise((*range)->at, size, MADV_DONTFORK); /* a GPU's mappings do not cross a fork either */
    (*range)->is_mapped = 1;
    memcpy((*range)->gpu, allocation->gpu, 16);
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    ENTER();
    struct range **range = range_at(address, size, 1);
    CHECK(range, CUDA_ERROR_INVALID_VALUE);
    mmap((*range)->at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    (*range)->is_mapped = 0;
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
    ENTER();
    struct range **range = range_at(address, size, 1);
    CHECK(range && count == 1 && access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE
          && access->location.type == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
    CHECK_DEVICE(access->location.id);
    CHECK(!no_peer || !memcmp((*range)->gpu, devices[access->location.id].uuid, 16), CUDA_ERROR_INVALID_DEVICE);
    CHECK(!mprotect((void *)(size_t)address, size, PROT_READ | PROT_WRITE), of_errno());
    return leave(CUDA_SUCCESS);
}

static int is_mapped(const char *at, size_t size) {
    for (struct range *range = ranges; range; range = range->next) {
        if (range->is_mapped && at >= range->at && at + size <= range->at + range->size) return 1;
    }
    return 0;
}

static void pause_us(long us) {
    nanosleep(&(struct timespec){us / 1000000, us % 1000000 * 1000}, NULL);
}

/* The second half comes after whatever pause was asked for. Called without the lock. */
static void copy(const struct operation *operation, long pause, const char *path) {
    size_t half = operation->size / 2;
    memcpy(operation->to, operation->from, half);
    if (pause) pause_us(rand() % (pause + 1));
    while (*path && !access(path, F_OK)) pause_us(500);
    memcpy(operation->to + half, operation->from + half, operation->size - half);
}

static void run(struct operation *operation) {
    char path[sizeof hold];
    pthread_mutex_lock(&lock);
    int fails = !strcmp(fail_call, "copy") && operation->size && --fail_after == 0;
    if (!lost && operation->size && !(is_mapped(operation->to, operation->size)
                                      && is_mapped(operation->from, operation->size))) {
        lost = CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    if (fails) lost = fail_with;
    int copies = !lost && operation->size;
    long pause = delay_us;
    memcpy(path, hold, sizeof path);
    pthread_mutex_unlock(&lock);
    if (copies) copy(operation, pause, path);
    if (operation->call) operation->call(operation->data);
}

static void *run_stream(void *argument) {
    CUstream stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        struct operation *operation = stream->first;
        if (!operation) {
            stream->busy = 0;
            pthread_cond_broadcast(&changed);
            if (stream->ending) break;
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        pthread_mutex_unlock(&lock);
        run(operation);
        pthread_mutex_lock(&lock);
        stream->first = operation->next;
        if (!stream->first) stream->last = &stream->first;
        if (operation->event && --operation->event->pending == 0 && operation->event->is_destroyed) free(operation->event);
        free(operation);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static void queue(CUstream stream, struct operation operation) {
    struct operation *queued = malloc(sizeof *queued);
    *queued = operation;
    *stream->last = queued;
    stream->last = &queued->next;
    stream->busy = 1;
    pthread_cond_broadcast(&changed);
}

EXPORTED CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    ENTER();
    CHECK_CONTEXT();
    CHECK(flags == CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
    CUstream made = calloc(1, sizeof *made);
    made->last = &made->first;
    if (pthread_create(&made->thread, NULL, run_stream, made)) {
        free(made);
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    num_streams++;
    *stream = made;
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuStreamSynchronize(CUstream stream) {
    ENTER();
    CHECK_CONTEXT();
    while (stream->busy) pthread_cond_wait(&changed, &lock);
    return leave(lost);
}

EXPORTED CUresult cuStreamDestroy(CUstream stream) {
    ENTER();
    CHECK(stream && !stream->ending, CUDA_ERROR_INVALID_HANDLE);
    stream->ending = 1;
    num_streams--;
    pthread_cond_broadcast(&changed);
    leave(CUDA_SUCCESS);
    pthread_join(stream->thread, NULL); /* so that tests count no thread that is about to end */
    free(stream);
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    ENTER();
    CHECK_CONTEXT();
    CHECK(size && stream, CUDA_ERROR_INVALID_VALUE);
    queue(stream, (struct operation){.to = (char *)(size_t)to, .from = (const char *)(size_t)from, .size = size});
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuLaunchHostFunc(CUstream stream, CUhostFn call, void *data) {
    ENTER();
    CHECK_CONTEXT();
    CHECK(call && stream, CUDA_ERROR_INVALID_VALUE);
    queue(stream, (struct operation){.call = call, .data = data});
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    ENTER();
    CHECK_CONTEXT();
    CHECK(flags == (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING), CUDA_ERROR_INVALID_VALUE);
    *event = calloc(1, sizeof **event);
    num_events++;
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER();
    CHECK_CONTEXT();
    CHECK(event && stream, CUDA_ERROR_INVALID_HANDLE);
    event->pending++;
    queue(stream, (struct operation){.event = event});
    return leave(CUDA_SUCCESS);
}

EXPORTED CUresult cuEventQuery(CUevent event) {
    ENTER();
    CHECK(event, CUDA_ERROR_INVALID_HANDLE);
    return leave(event->pending ? CUDA_ERROR_NOT_READY : lost);
}

EXPORTED CUresult cuEventSynchronize(CUevent event) {
    ENTER();
    CHECK(event, CUDA_ERROR_INVALID_HANDLE);
    while (event->pending) pthread_cond_wait(&changed, &lock);
    return leave(lost);
}

EXPORTED CUresult cuEventDestroy(CUevent event) {
    ENTER();
    CHECK(event && !event->is_destroyed, CUDA_ERROR_INVALID_HANDLE);
    event->is_destroyed = 1;
    num_events--;
    if (!event->pending) free(event);
    return leave(CUDA_SUCCESS);
}
