/* A stand-in for libnccl.so.2 on machines without a GPU: communicators of two ranks over an abstract Unix socket.

   unique id   the name of a socket that listens in the process which asked for it; that process is rank 0
   send, recv  run on streams of the stand-in for the driver, and block until the other end has come to the same one
   non-blocking, as NCCL is with that configuration: calls answer ncclInProgress; a beginning goes on in a thread, and a
               group begins only when its communicator is asked for its state

   A peer that has gone is not noticed by who waits for it, as over NVLink: only an abort ends that.

   Set by environment variables (STANDIN_NCCL_NAME) or standin_nccl_set("NAME", "value"):
     CUDA      path of the stand-in for the driver (no default)
     VERSION   what ncclGetVersion says
     DELAY_US  a beginning, and each operation, pauses for a random time up to this; an operation half-way
     HOLD      a path: while that file exists, receives stop half-way through a block
     FAIL      CALL:N:CODE = the N-th call of CALL from now on returns CODE; `async:N:CODE` = at the N-th question for its
               state, a communicator says CODE
     HANG      `abort`: no abort returns; `init`: no beginning ends but by abort
     SPOIL     1 = the first byte of each block changes on its way
   standin_nccl_live("communicators" | "ids" | "moves") = how many there are now. */

#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define ID_BYTES 128
#define MAX_IDS 4096
#define MAX_MOVES 4096
#define CONFIG_MAGIC 0xcafebeefu

enum result { SUCCESS, CUDA_FAILED, SYSTEM_FAILED, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_FAILED, IN_PROGRESS };

typedef struct { char internal[ID_BYTES]; } unique_id;
struct config { size_t size; unsigned magic, version; int blocking, cga, min_ctas, max_ctas; };
struct move { char *at; size_t size; int sends; };
struct communicator {
    unique_id id;
    int rank, fd, state, aborted, num_launched;
    pthread_t beginning;
    CUstream stream;
    struct move moves[MAX_MOVES];
    int num_moves, is_due;
};
struct group { struct communicator *communicator; int num_moves; struct move *moves; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct { unique_id id; int fd; } ids[MAX_IDS];
static int is_ready, version = 22707, fail_after, fail_with, num_communicators, num_ids, num_moving, spoils;
static char cuda_path[512], hold[512], fail_call[64], hang[16];
static long delay_us;
static CUresult (*launch)(CUstream, CUhostFn, void *);
static __thread int depth;
static __thread struct communicator *grouped;

static const char *const settings[] = {"CUDA", "VERSION", "DELAY_US", "HOLD", "FAIL", "HANG", "SPOIL"};

EXPORTED void standin_nccl_set(const char *name, const char *value) {
    pthread_mutex_lock(&lock);
    if (!strcmp(name, "CUDA")) snprintf(cuda_path, sizeof cuda_path, "%s", value);
    if (!strcmp(name, "VERSION")) version = atoi(value);
    if (!strcmp(name, "DELAY_US")) delay_us = atol(value);
    if (!strcmp(name, "HOLD")) snprintf(hold, sizeof hold, "%s", value);
    if (!strcmp(name, "HANG")) snprintf(hang, sizeof hang, "%s", value);
    if (!strcmp(name, "SPOIL")) spoils = atoi(value);
    if (!strcmp(name, "FAIL")) {
        fail_call[0] = 0;
        fail_after = fail_with = 0;
        sscanf(value, "%63[^:]:%d:%d", fail_call, &fail_after, &fail_with);
    }
    pthread_mutex_unlock(&lock);
}

EXPORTED int standin_nccl_live(const char *what) {
    pthread_mutex_lock(&lock);
    int count = !strcmp(what, "communicators") ? num_communicators : !strcmp(what, "ids") ? num_ids : num_moving;
    pthread_mutex_unlock(&lock);
    return count;
}

/* What every call asks first; the lock is held from here on if it returns SUCCESS. */
static int enter(const char *call) {
    pthread_mutex_lock(&lock);
    if (!is_ready) {
        is_ready = 1;
        pthread_mutex_unlock(&lock);
        for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
            char name[64];
            snprintf(name, sizeof name, "STANDIN_NCCL_%s", settings[i]);
            if (getenv(name)) standin_nccl_set(settings[i], getenv(name));
        }
        pthread_mutex_lock(&lock);
    }
    if (!strcmp(call, fail_call) && --fail_after == 0) {
        pthread_mutex_unlock(&lock);
        return fail_with;
    }
    return SUCCESS;
}

static int leave(int status) {
    pthread_mutex_unlock(&lock);
    return status;
}

#define ENTER() do { int refused = enter(__func__); if (refused) return refused; } while (0)
#define CHECK(condition, error) do { if (!(condition)) return leave(error); } while (0)

EXPORTED const char *ncclGetErrorString(int status) {
    static const char *const texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                        "invalid argument", "invalid usage", "remote process has exited or failed",
                                        "in progress"};
    return status >= 0 && status <= IN_PROGRESS ? texts[status] : "unknown";
}

EXPORTED int ncclGetVersion(int *number) {
    ENTER();
    *number = version;
    return leave(SUCCESS);
}

static socklen_t address_of(const unique_id *id, struct sockaddr_un *address) {
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "%.100s", id->internal);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(address->sun_path + 1));
}

EXPORTED int ncclGetUniqueId(unique_id *id) {
    struct sockaddr_un address;
    uint64_t random[2];
    ENTER();
    int slot = 0;
    while (slot < MAX_IDS && ids[slot].fd) slot++;
    CHECK(slot < MAX_IDS && getrandom(random, sizeof random, 0) == sizeof random, SYSTEM_FAILED);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, ID_BYTES, "standin-nccl-%016llx%016llx", (unsigned long long)random[0],
             (unsigned long long)random[1]);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t length = address_of(id, &address);
    CHECK(fd > 0 && !bind(fd, (struct sockaddr *)&address, length) && !listen(fd, 1), SYSTEM_FAILED);
    ids[slot].id = *id;
    ids[slot].fd = fd;
    num_ids++;
    return leave(SUCCESS);
}

static void pause_us(long us) {
    nanosleep(&(struct timespec){us / 1000000, us % 1000000 * 1000}, NULL);
}

static void random_pause(void) {
    long most = delay_us;
    if (most) pause_us(rand() % (most + 1));
}

/* Until `fd` has something to do, or for ever if the peer has gone; 0 = aborted. */
static int until(struct communicator *communicator, int fd, short events) {
    while (!__atomic_load_n(&communicator->aborted, __ATOMIC_ACQUIRE)) {
        struct pollfd one = {fd, events, 0};
        if (poll(&one, 1, 5) > 0 && one.revents & events) return 1;
        if (one.revents) pause_us(5000);
    }
    return 0;
}

/* Moves all bytes; 0 = aborted. A peer that has gone is waited for. */
static int transfer(struct communicator *communicator, char *at, size_t size, int sends) {
    while (size) {
        if (!until(communicator, communicator->fd, sends ? POLLOUT : POLLIN)) return 0;
        ssize_t count = sends ? send(communicator->fd, at, size, MSG_NOSIGNAL | MSG_DONTWAIT)
                              : recv(communicator->fd, at, size, MSG_DONTWAIT);
        if (count > 0) {
            at += count;
            size -= (size_t)count;
        } else {
            pause_us(2000);
        }
    }
    return 1;
}

static void set_state(struct communicator *communicator, int state) {
    pthread_mutex_lock(&lock);
    communicator->state = state;
    pthread_mutex_unlock(&lock);
}

static int take_listener(const unique_id *id) {
    int fd = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_IDS; i++) {
        if (!ids[i].fd || memcmp(&ids[i].id, id, sizeof *id)) continue;
        fd = ids[i].fd;
        ids[i].fd = 0;
        num_ids--;
    }
    pthread_mutex_unlock(&lock);
    return fd;
}

/* The two ranks have met when each has the other's byte. */
static void *begin(void *argument) {
    struct communicator *communicator = argument;
    struct sockaddr_un address;
    char byte = 'n';
    random_pause();
    if (communicator->rank == 0) {
        int listener = take_listener(&communicator->id);
        if (listener && until(communicator, listener, POLLIN)) communicator->fd = accept(listener, NULL, NULL);
        if (listener) close(listener);
    } else {
        socklen_t length = address_of(&communicator->id, &address);
        communicator->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(communicator->fd, (struct sockaddr *)&address, length)) {
            close(communicator->fd);
            communicator->fd = -1;
        }
    }
    if (communicator->fd < 0) {
        set_state(communicator, SYSTEM_FAILED);
        return NULL;
    }
    while (!strcmp(hang, "init") && !communicator->aborted) pause_us(1000);
    if (transfer(communicator, &byte, 1, 1) && transfer(communicator, &byte, 1, 0)) set_state(communicator, SUCCESS);
    return NULL;
}

EXPORTED int ncclCommInitRankConfig(
    struct communicator **made, int num_ranks, unique_id id, int rank, const struct config *config) {
    ENTER();
    CHECK(config->magic == CONFIG_MAGIC && config->size >= sizeof *config && config->version >= 21400
          && config->blocking == 0 && config->max_ctas > 0 && config->max_ctas <= 32, INVALID_ARGUMENT);
    CHECK(num_ranks == 2 && (rank == 0 || rank == 1), INVALID_USAGE);
    if (!launch) {
        void *cuda = dlopen(cuda_path, RTLD_NOW);
        launch = cuda ? (CUresult(*)(CUstream, CUhostFn, void *))dlsym(cuda, "cuLaunchHostFunc") : NULL;
        CHECK(launch, CUDA_FAILED);
    }
    struct communicator *communicator = calloc(1, sizeof *communicator);
    communicator->id = id;
    communicator->rank = rank;
    communicator->fd = -1;
    communicator->state = IN_PROGRESS;
    CHECK(!pthread_create(&communicator->beginning, NULL, begin, communicator), SYSTEM_FAILED);
    num_communicators++;
    *made = communicator;
    return leave(IN_PROGRESS);
}

static int add(struct communicator *communicator, char *at, size_t size, int type, int peer, CUstream stream, int sends) {
    CHECK(depth && (!grouped || grouped == communicator) && !communicator->is_due
          && communicator->num_moves < MAX_MOVES, INVALID_USAGE);
    CHECK(at && size && type == 1 && peer == 1 - communicator->rank && stream, INVALID_ARGUMENT);
    CHECK(communicator->state == SUCCESS, INVALID_USAGE); /* asked for more before the last was done */
    grouped = communicator;
    communicator->stream = stream;
    communicator->moves[communicator->num_moves++] = (struct move){at, size, sends};
    return leave(SUCCESS);
}

EXPORTED int ncclSend(
    const void *at, size_t size, int type, int peer, struct communicator *communicator, CUstream stream) {
    ENTER();
    return add(communicator, (char *)(uintptr_t)at, size, type, peer, stream, 1);
}

EXPORTED int ncclRecv(void *at, size_t size, int type, int peer, struct communicator *communicator, CUstream stream) {
    ENTER();
    return add(communicator, at, size, type, peer, stream, 0);
}

EXPORTED int ncclGroupStart(void) {
    ENTER();
    depth++;
    return leave(SUCCESS);
}

EXPORTED int ncclGroupEnd(void) {
    ENTER();
    CHECK(depth > 0, INVALID_USAGE);
    struct communicator *communicator = grouped;
    if (--depth || !communicator) return leave(SUCCESS);
    grouped = NULL;
    communicator->is_due = 1;
    communicator->state = IN_PROGRESS;
    return leave(IN_PROGRESS);
}

static int send_one(struct communicator *communicator, const struct move *move) {
    uint64_t size = move->size;
    char go, first = move->at[0];
    if (!transfer(communicator, (char *)&size, sizeof size, 1) || !transfer(communicator, &go, 1, 0)) return 0;
    random_pause();
    if (spoils) first = (char)~first;
    return transfer(communicator, &first, 1, 1) && transfer(communicator, move->at + 1, move->size - 1, 1);
}

static int receive_one(struct communicator *communicator, const struct move *move) {
    uint64_t size = 0;
    char go = 'g', path[sizeof hold];
    size_t half = move->size / 2;
    if (!transfer(communicator, (char *)&size, sizeof size, 0)) return 0;
    if (size != move->size) {
        set_state(communicator, INVALID_USAGE);
        return 0;
    }
    if (!transfer(communicator, &go, 1, 1) || !transfer(communicator, move->at, half, 0)) return 0;
    random_pause();
    memcpy(path, hold, sizeof path);
    while (*path && !access(path, F_OK) && !__atomic_load_n(&communicator->aborted, __ATOMIC_ACQUIRE)) pause_us(500);
    return transfer(communicator, move->at + half, move->size - half, 0);
}

/* A group, as a stream comes to it; after a failed move nothing more is moved, and only an abort ends it. */
static void run(void *argument) {
    struct group *group = argument;
    struct communicator *communicator = group->communicator;
    int moved = 1;
    for (int i = 0; i < group->num_moves && moved; i++) {
        const struct move *move = &group->moves[i];
        moved = move->sends ? send_one(communicator, move) : receive_one(communicator, move);
    }
    while (!moved && !__atomic_load_n(&communicator->aborted, __ATOMIC_ACQUIRE)) pause_us(500);
    pthread_mutex_lock(&lock);
    communicator->num_launched--;
    num_moving--;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    free(group->moves);
    free(group);
}

EXPORTED int ncclCommGetAsyncError(struct communicator *communicator, int *state) {
    ENTER();
    if (!strcmp(fail_call, "async") && --fail_after == 0) communicator->state = fail_with;
    if (communicator->is_due && communicator->state == IN_PROGRESS) {
        struct group *group = malloc(sizeof *group);
        size_t size = sizeof(struct move) * (size_t)communicator->num_moves;
        *group = (struct group){communicator, communicator->num_moves, memcpy(malloc(size), communicator->moves, size)};
        communicator->num_moves = communicator->is_due = 0;
        communicator->num_launched++;
        num_moving++;
        communicator->state = launch(communicator->stream, run, group) ? CUDA_FAILED : SUCCESS;
    }
    *state = communicator->state;
    return leave(SUCCESS);
}

EXPORTED int ncclCommAbort(struct communicator *communicator) {
    ENTER();
    pthread_mutex_unlock(&lock);
    while (!strcmp(hang, "abort")) pause_us(1000);
    __atomic_store_n(&communicator->aborted, 1, __ATOMIC_RELEASE);
    pthread_join(communicator->beginning, NULL);
    pthread_mutex_lock(&lock);
    while (communicator->num_launched) pthread_cond_wait(&changed, &lock);
    if (communicator->fd >= 0) close(communicator->fd);
    num_communicators--;
    free(communicator);
    return leave(SUCCESS);
}
