/* A make-believe libnvidia-ml.so.1, driven through files, so that every test goes through the
 * real pynvml binding.
 *
 * $RLQ_NVML_STUB names a folder.  Both files are read afresh at EVERY call, so that a test can
 * change the GPUs under a running daemon; the writer replaces them by rename.
 *
 *   gpus       lines key=value.  Lines before the first `index=` are global:
 *                init_error=9     every nvmlInit fails so, and every other call too
 *                hang_s=3         every device call sleeps first
 *                driver=550.1
 *              `index=N` begins a GPU:
 *                uuid= name= mem_total_mib= mem_external_mib= mem_reserved_mib= sm_external=
 *                temperature= power_w= mig=0|1 util_supported=0|1 error=CODE
 *                proc_mem_known=0|1     0: usedGpuMemory is "not available"
 *                cpu_affinity=HEX[,HEX…]  masks of 64 CPUs each, up to 4; "none": not supported
 *                fail=Function:CODE     one nvmlDevice<Function> fails (the line may repeat)
 *                mig_device=UUID,TOTAL_MIB,EXTERNAL_MIB     (may repeat; used where mig=1)
 *   procs/PID  lines "gpu_index mem_mib sm[,sm…] [C|G|M] [mig_uuid]": what a process holds.
 *              Several sm values: several samples; "-": no sample.  A dead process's file is
 *              ignored: its memory returns as a real driver's would.
 *
 * As with a real driver, a board that was seen lost (error=15) stays so, whatever the file says,
 * until NVML is shut down and initialised again.
 */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15, VERSION_MISMATCH = 25,
};
#define GPUS 16
#define MIGS 8
#define PROCS 512
#define FAILS 16
#define SAMPLES 8
#define MIB (1ULL << 20)

typedef unsigned long long u64;

typedef struct { char uuid[96]; u64 total, external; } Mig;
typedef struct {
    int index, mig, util_supported, error, proc_mem_known, affinity_known, nfails, nmigs;
    char uuid[96], name[96];
    u64 total, external, reserved, affinity[4];
    int sm_external, temperature, power_w;
    struct { char function[64]; int code; } fails[FAILS];
    Mig migs[MIGS];
} Gpu;
typedef struct { int init_error; double hang_s; char driver[80]; int n; Gpu gpus[GPUS]; } State;
typedef struct { int pid, gpu, nsamples, sm[SAMPLES]; u64 mem; char kind; char mig[96]; } Proc;

/* A handle stands for a board, whatever index it has later: an entry in a table of UUIDs. */
typedef struct { char uuid[96]; int lost; } Handle;
static Handle handles[64];
static int initialised;

static Handle *handle_for(const char *uuid) {
    for (int i = 0; i < 64; i++) {
        if (!handles[i].uuid[0]) snprintf(handles[i].uuid, sizeof handles[i].uuid, "%s", uuid);
        if (!strcmp(handles[i].uuid, uuid)) return &handles[i];
    }
    return NULL;
}

static void copy(char *to, size_t size, const char *from) { snprintf(to, size, "%s", from); }

static void load(State *s) {
    char path[4096], line[512];
    memset(s, 0, sizeof *s);
    copy(s->driver, sizeof s->driver, "550.54.15");
    const char *folder = getenv("RLQ_NVML_STUB");
    if (!folder) { s->init_error = 9; return; }
    snprintf(path, sizeof path, "%s/gpus", folder);
    FILE *f = fopen(path, "r");
    if (!f) { s->init_error = 9; return; }
    Gpu *g = NULL;
    while (fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        char *v = strchr(line, '=');
        if (!v) continue;
        *v++ = 0;
        const char *k = line;
        if (!strcmp(k, "index")) {
            if (s->n == GPUS) break;
            g = &s->gpus[s->n++];
            g->index = atoi(v);
            g->util_supported = g->proc_mem_known = 1;
        } else if (!g) {
            if (!strcmp(k, "init_error")) s->init_error = atoi(v);
            else if (!strcmp(k, "hang_s")) s->hang_s = atof(v);
            else if (!strcmp(k, "driver")) copy(s->driver, sizeof s->driver, v);
        } else if (!strcmp(k, "uuid")) copy(g->uuid, sizeof g->uuid, v);
        else if (!strcmp(k, "name")) copy(g->name, sizeof g->name, v);
        else if (!strcmp(k, "mem_total_mib")) g->total = strtoull(v, 0, 10) * MIB;
        else if (!strcmp(k, "mem_external_mib")) g->external = strtoull(v, 0, 10) * MIB;
        else if (!strcmp(k, "mem_reserved_mib")) g->reserved = strtoull(v, 0, 10) * MIB;
        else if (!strcmp(k, "sm_external")) g->sm_external = atoi(v);
        else if (!strcmp(k, "temperature")) g->temperature = atoi(v);
        else if (!strcmp(k, "power_w")) g->power_w = atoi(v);
        else if (!strcmp(k, "mig")) g->mig = atoi(v);
        else if (!strcmp(k, "util_supported")) g->util_supported = atoi(v);
        else if (!strcmp(k, "proc_mem_known")) g->proc_mem_known = atoi(v);
        else if (!strcmp(k, "error")) g->error = atoi(v);
        else if (!strcmp(k, "cpu_affinity")) {
            g->affinity_known = isxdigit((unsigned char)v[0]) != 0;
            for (int i = 0; i < 4 && isxdigit((unsigned char)*v); i++) {
                g->affinity[i] = strtoull(v, &v, 16);
                v += *v == ',';
            }
        } else if (!strcmp(k, "fail") && g->nfails < FAILS) {
            char *code = strchr(v, ':');
            if (!code) continue;
            *code++ = 0;
            copy(g->fails[g->nfails].function, sizeof g->fails[0].function, v);
            g->fails[g->nfails++].code = atoi(code);
        } else if (!strcmp(k, "mig_device") && g->nmigs < MIGS) {
            Mig *m = &g->migs[g->nmigs++];
            unsigned long long total = 0, external = 0;
            sscanf(v, "%95[^,],%llu,%llu", m->uuid, &total, &external);
            m->total = total * MIB;
            m->external = external * MIB;
        }
    }
    fclose(f);
}

static int alive(int pid) {
    char path[64], text[512];
    if (kill(pid, 0) && errno == ESRCH) return 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = 0;
    char *end = strrchr(text, ')');
    return end && end[1] && end[2] != 'Z' && end[2] != 'X';
}

static int load_procs(Proc *procs) {
    char path[4096], line[512], sm[256];
    const char *folder = getenv("RLQ_NVML_STUB");
    int n = 0;
    snprintf(path, sizeof path, "%s/procs", folder ? folder : "");
    DIR *d = opendir(path);
    if (!d) return 0;
    for (struct dirent *e; (e = readdir(d));) {
        char *end;
        long pid = strtol(e->d_name, &end, 10);
        if (*end || pid <= 0 || !alive((int)pid)) continue;
        snprintf(path, sizeof path, "%s/procs/%ld", folder, pid);
        FILE *f = fopen(path, "r");
        if (!f) continue;
        while (n < PROCS && fgets(line, sizeof line, f)) {
            Proc *p = &procs[n];
            memset(p, 0, sizeof *p);
            p->pid = (int)pid;
            p->kind = 'C';
            unsigned long long mem;
            if (sscanf(line, "%d %llu %255s %c %95s", &p->gpu, &mem, sm, &p->kind, p->mig) < 3)
                continue;
            p->mem = mem * MIB;
            for (char *t = strtok(sm, ","); t && p->nsamples < SAMPLES; t = strtok(NULL, ","))
                if (isdigit((unsigned char)*t)) p->sm[p->nsamples++] = atoi(t);
            n++;
        }
        fclose(f);
    }
    closedir(d);
    return n;
}

static int global_error(State *s) {
    load(s);
    return initialised ? s->init_error : UNINITIALIZED;
}

/* Find what a handle stands for.  Answers the error that this device is to give, if any. */
static int enter(void *handle, const char *function, State *s, Gpu **gpu, Mig **mig) {
    int error = global_error(s);
    if (error) return error;
    if (s->hang_s > 0) usleep((useconds_t)(s->hang_s * 1e6));
    if ((Handle *)handle < handles || (Handle *)handle >= handles + 64) return INVALID_ARGUMENT;
    *mig = NULL;
    for (int i = 0; i < s->n; i++) {
        Gpu *g = *gpu = &s->gpus[i];
        int found = !strcmp(g->uuid, ((Handle *)handle)->uuid);
        for (int j = 0; g->mig && !found && j < g->nmigs; j++)
            if ((found = !strcmp(g->migs[j].uuid, ((Handle *)handle)->uuid))) *mig = &g->migs[j];
        if (!found) continue;
        if (g->error == GPU_IS_LOST) ((Handle *)handle)->lost = 1;
        if (((Handle *)handle)->lost) return GPU_IS_LOST;
        if (g->error) return g->error;
        for (int j = 0; j < g->nfails; j++)
            if (!strcmp(g->fails[j].function, function)) return g->fails[j].code;
        return OK;
    }
    return GPU_IS_LOST;
}
#define ENTER(function)                                            \
    static State s; Gpu *g; Mig *m;                                \
    int error = enter(handle, function, &s, &g, &m);               \
    if (error) return error

static int on(const Proc *p, const Gpu *g, const Mig *m) {
    return p->gpu == g->index && (!m || !strcmp(p->mig, m->uuid));
}

static int mean_sm(const Proc *p) {
    int sum = 0;
    for (int i = 0; i < p->nsamples; i++) sum += p->sm[i];
    return p->nsamples ? sum / p->nsamples : 0;
}

static Proc procs[PROCS];

int nvmlInitWithFlags(unsigned flags) {
    static State s;
    (void)flags;
    load(&s);
    if (s.init_error) return s.init_error;
    if (!initialised++)
        for (int i = 0; i < 64; i++) handles[i].lost = 0;
    return OK;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) {
    if (!initialised) return UNINITIALIZED;
    initialised--;
    return OK;
}

const char *nvmlErrorString(int code) {
    static char text[32];
    snprintf(text, sizeof text, "stub error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *to, unsigned size) {
    static State s;
    int error = global_error(&s);
    if (!error) copy(to, size, s.driver);
    return error;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    static State s;
    int error = global_error(&s);
    if (!error) *count = (unsigned)s.n;
    return error;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    static State s;
    int error = global_error(&s);
    if (error) return error;
    for (int i = 0; i < s.n; i++)
        if (s.gpus[i].index == (int)index) {
            *handle = handle_for(s.gpus[i].uuid);
            return s.gpus[i].error;
        }
    return INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    static State s;
    int error = global_error(&s);
    if (error) return error;
    for (int i = 0; i < s.n; i++) {
        Gpu *g = &s.gpus[i];
        int found = !strcmp(g->uuid, uuid);
        for (int j = 0; g->mig && j < g->nmigs; j++) found |= !strcmp(g->migs[j].uuid, uuid);
        if (found) { *handle = handle_for(uuid); return g->error; }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetName(void *handle, char *to, unsigned size) {
    ENTER("GetName");
    if (m) snprintf(to, size, "%s MIG %lluMiB", g->name, m->total / MIB);
    else copy(to, size, g->name);
    return OK;
}

int nvmlDeviceGetUUID(void *handle, char *to, unsigned size) {
    ENTER("GetUUID");
    copy(to, size, m ? m->uuid : g->uuid);
    return OK;
}

int nvmlDeviceGetIndex(void *handle, unsigned *index) {
    ENTER("GetIndex");
    *index = (unsigned)g->index;
    return OK;
}

static u64 used(const Gpu *g, const Mig *m) {
    u64 sum = m ? m->external : g->external;
    int n = load_procs(procs);
    for (int i = 0; i < n; i++)
        if (on(&procs[i], g, m)) sum += procs[i].mem;
    return sum;
}

typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;

static void fill_memory(MemoryV2 *to, const Gpu *g, const Mig *m) {
    to->total = m ? m->total : g->total;
    to->reserved = m ? 0 : g->reserved;
    to->used = used(g, m);
    u64 taken = to->used + to->reserved;
    to->free = taken < to->total ? to->total - taken : 0;
}

int nvmlDeviceGetMemoryInfo(void *handle, Memory *to) {
    ENTER("GetMemoryInfo");
    MemoryV2 v2;
    fill_memory(&v2, g, m);
    to->total = v2.total;
    to->free = v2.free;
    to->used = v2.total - v2.free; /* version 1 counts reserved memory as used */
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *to) {
    ENTER("GetMemoryInfo_v2");
    if (to->version != (sizeof *to | 2u << 24)) return VERSION_MISMATCH;
    fill_memory(to, g, m);
    return OK;
}

typedef struct { unsigned gpu, memory; } Utilization;

int nvmlDeviceGetUtilizationRates(void *handle, Utilization *to) {
    ENTER("GetUtilizationRates");
    if (!g->util_supported || g->mig) return NOT_SUPPORTED;
    int sum = g->sm_external, n = load_procs(procs);
    for (int i = 0; i < n; i++)
        if (on(&procs[i], g, NULL)) sum += mean_sm(&procs[i]);
    to->gpu = (unsigned)(sum < 100 ? sum : 100);
    to->memory = 0;
    return OK;
}

typedef struct { unsigned pid; u64 time_us; unsigned sm, mem, enc, dec; } Sample;

int nvmlDeviceGetProcessUtilization(void *handle, Sample *to, unsigned *count, u64 since_us) {
    ENTER("GetProcessUtilization");
    if (!g->util_supported || g->mig) return NOT_SUPPORTED;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    u64 now_us = (u64)now.tv_sec * 1000000 + (u64)now.tv_nsec / 1000;
    unsigned total = 0;
    int n = now_us > since_us ? load_procs(procs) : 0;
    for (int i = 0; i < n; i++)
        if (on(&procs[i], g, NULL)) total += (unsigned)procs[i].nsamples;
    if (!total) return NOT_FOUND;
    if (!to || *count < total) { *count = total; return INSUFFICIENT_SIZE; }
    unsigned k = 0;
    for (int i = 0; i < n; i++)
        for (int j = 0; on(&procs[i], g, NULL) && j < procs[i].nsamples; j++)
            to[k++] = (Sample){(unsigned)procs[i].pid, now_us, (unsigned)procs[i].sm[j], 0, 0, 0};
    *count = k;
    return OK;
}

typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } ProcessInfo;

static int list_procs(Gpu *g, Mig *m, char kind, unsigned *count, ProcessInfo *to) {
    unsigned k = 0, total = 0;
    int n = load_procs(procs);
    for (int i = 0; i < n; i++) total += on(&procs[i], g, m) && procs[i].kind == kind;
    if (total && (!to || *count < total)) { *count = total; return INSUFFICIENT_SIZE; }
    for (int i = 0; i < n; i++)
        if (on(&procs[i], g, m) && procs[i].kind == kind)
            to[k++] = (ProcessInfo){(unsigned)procs[i].pid,
                                    g->proc_mem_known ? procs[i].mem : ~0ULL, ~0u, ~0u};
    *count = k;
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, ProcessInfo *to) {
    ENTER("GetComputeRunningProcesses_v3");
    return list_procs(g, m, 'C', count, to);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, ProcessInfo *to) {
    ENTER("GetGraphicsRunningProcesses_v3");
    return list_procs(g, m, 'G', count, to);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *handle, unsigned *count, ProcessInfo *to) {
    ENTER("GetMPSComputeRunningProcesses_v3");
    return list_procs(g, m, 'M', count, to);
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *to) {
    ENTER("GetTemperature");
    if (sensor) return INVALID_ARGUMENT;
    if (m) return NOT_SUPPORTED;
    *to = (unsigned)g->temperature;
    return OK;
}

typedef struct { unsigned version; int sensor, temperature; } Temperature;

int nvmlDeviceGetTemperatureV(void *handle, Temperature *to) {
    ENTER("GetTemperatureV");
    if (to->version != (sizeof *to | 1u << 24)) return VERSION_MISMATCH;
    if (m) return NOT_SUPPORTED;
    to->temperature = g->temperature;
    return OK;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
    ENTER("GetPowerUsage");
    if (m) return NOT_SUPPORTED;
    *milliwatts = (unsigned)g->power_w * 1000;
    return OK;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    ENTER("GetMigMode");
    if (m) return INVALID_ARGUMENT;
    *current = *pending = (unsigned)g->mig;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
    ENTER("GetMaxMigDeviceCount");
    *count = g->mig ? MIGS : 0;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **to) {
    ENTER("GetMigDeviceHandleByIndex");
    if (!g->mig || index >= (unsigned)g->nmigs) return NOT_FOUND;
    *to = handle_for(g->migs[index].uuid);
    return OK;
}

int nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *to) {
    ENTER("IsMigDeviceHandle");
    *to = m != NULL;
    return OK;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **to) {
    ENTER("GetDeviceHandleFromMigDeviceHandle");
    if (!m) return INVALID_ARGUMENT;
    *to = handle_for(g->uuid);
    return OK;
}

int nvmlDeviceGetCpuAffinity(void *handle, unsigned words, unsigned long *to) {
    ENTER("GetCpuAffinity");
    if (!g->affinity_known) return NOT_SUPPORTED;
    memset(to, 0, words * sizeof *to);
    for (unsigned i = 0; i < words && i < 4; i++) to[i] = (unsigned long)g->affinity[i];
    return OK;
}

int nvmlDeviceGetComputeMode(void *handle, int *mode) {
    ENTER("GetComputeMode");
    *mode = 0;
    return OK;
}

int nvmlDeviceGetPersistenceMode(void *handle, int *mode) {
    ENTER("GetPersistenceMode");
    *mode = 1;
    return OK;
}
