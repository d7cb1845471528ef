/* wanem: shapes the links between sites, for kernels without netem.
 *
 * usage: wanem SOCKET SITE,NETWORK_NAMESPACE,PREFIX/LENGTH ...
 *
 * Makes a TUN device `wan0` in the network namespace of every site. An IPv4 packet that site A sends there goes to the
 * site B whose prefix holds its destination, over the directed link A -> B:
 *
 *     cut, or lost by chance            -> dropped
 *     backlog + packet > queue          -> dropped (tail drop; the backlog is what waits for the line, in bytes)
 *     leaves the line at                   max(now, line free) + (packet + 38) * 8 / rate
 *     arrives                              delay +- jitter later, never before an earlier packet
 *
 * 38 bytes are what Ethernet adds around a packet: preamble 8, header 14, checksum 4, gap 12.
 *
 * SOCKET is a unix datagram socket; each request is one datagram and gets one answer, "ok" or what is wrong:
 *     link A B BITS_PER_SECOND DELAY_NS JITTER_NS LOSS QUEUE_BYTES    shapes A -> B from the next packet on
 *     cut A B | heal A B                                              a cut link also loses what is under way
 *     stats                                                           a line "A B PACKETS BYTES FULL LOST" per link
 *
 * One thread on one core forwards about 2 Gb/s over all links together. SIGTERM ends it; the devices go with it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAX_SITES = 16, MAX_PACKET = 65536, BURST = 64, FRAMING_BYTES = 38 };

struct packet {
    struct packet *next;
    uint64_t arrives_ns;
    size_t length;
    unsigned char data[];
};

struct link {
    double bits_per_second, delay_ns, jitter_ns, loss, queue_bytes;
    int cut;
    uint64_t line_free_ns, last_arrival_ns;
    struct packet *head, *tail;
    uint64_t packets, bytes, full, lost;
};

struct site {
    char name[32];
    uint32_t network, mask; /* network byte order */
    int device;
};

static struct site sites[MAX_SITES];
static struct link links[MAX_SITES][MAX_SITES];
static int site_count;
static unsigned seed = 1;
static volatile sig_atomic_t ended;

static void on_end(int signal_number) {
    (void)signal_number;
    ended = 1;
}

static void fail(const char *what) {
    fprintf(stderr, "wanem: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static double chance(void) { return rand_r(&seed) / (RAND_MAX + 1.0); }

/* --- sites -------------------------------------------------------------------------------------------------------- */

static int open_device(const char *network_namespace) {
    int own = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    int other = open(network_namespace, O_RDONLY | O_CLOEXEC);
    if (own < 0 || other < 0 || setns(other, CLONE_NEWNET)) fail(network_namespace);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    struct ifreq request = {.ifr_name = "wan0", .ifr_flags = IFF_TUN | IFF_NO_PI};
    if (device < 0 || ioctl(device, TUNSETIFF, &request)) fail("/dev/net/tun");
    if (setns(own, CLONE_NEWNET)) fail("network namespace");
    close(own);
    close(other);
    return device;
}

static void add_site(const char *argument) {
    char network_namespace[128], address[32];
    int length;
    struct in_addr parsed;
    if (site_count == MAX_SITES) errno = E2BIG, fail(argument);
    struct site *site = &sites[site_count++];
    errno = EINVAL;
    if (sscanf(argument, "%31[^,],%127[^,],%31[^/]/%d", site->name, network_namespace, address, &length) != 4) fail(argument);
    if (!inet_aton(address, &parsed) || length < 1 || length > 32) fail(argument);
    site->mask = htonl(~0u << (32 - length));
    site->network = parsed.s_addr & site->mask;
    site->device = open_device(network_namespace);
}

static int find_site(const char *name) {
    for (int index = 0; index < site_count; index++)
        if (!strcmp(sites[index].name, name)) return index;
    return -1;
}

static int site_of(uint32_t address) {
    for (int index = 0; index < site_count; index++)
        if ((address & sites[index].mask) == sites[index].network) return index;
    return -1;
}

/* --- links -------------------------------------------------------------------------------------------------------- */

static void enter_link(struct link *link, const unsigned char *data, size_t length, uint64_t now) {
    if (link->cut || chance() < link->loss) {
        link->lost++;
        return;
    }
    uint64_t start_ns = link->line_free_ns > now ? link->line_free_ns : now;
    double backlog_bytes = (double)(start_ns - now) * link->bits_per_second / 8e9;
    struct packet *packet = NULL;
    if (backlog_bytes + (double)length <= link->queue_bytes) packet = malloc(sizeof *packet + length);
    if (!packet) {
        link->full++;
        return;
    }
    link->line_free_ns = start_ns + (uint64_t)((double)(length + FRAMING_BYTES) * 8e9 / link->bits_per_second);
    double delay_ns = link->delay_ns + (2 * chance() - 1) * link->jitter_ns;
    uint64_t arrives_ns = link->line_free_ns + (uint64_t)(delay_ns > 0 ? delay_ns : 0);
    if (arrives_ns < link->last_arrival_ns) arrives_ns = link->last_arrival_ns;
    *packet = (struct packet){.arrives_ns = arrives_ns, .length = length};
    memcpy(packet->data, data, length);
    link->last_arrival_ns = arrives_ns;
    if (link->tail) link->tail->next = packet;
    else link->head = packet;
    link->tail = packet;
}

/* Delivers what has arrived; returns when the next packet will, UINT64_MAX for never. */
static uint64_t leave_link(struct link *link, int device, uint64_t now) {
    while (link->head && link->head->arrives_ns <= now) {
        struct packet *packet = link->head;
        link->head = packet->next;
        if (!link->head) link->tail = NULL;
        if (!link->cut && write(device, packet->data, packet->length) >= 0) {
            link->packets++;
            link->bytes += packet->length;
        } else {
            link->lost++;
        }
        free(packet);
    }
    return link->head ? link->head->arrives_ns : UINT64_MAX;
}

static void read_site(int from, uint64_t now) {
    static unsigned char data[MAX_PACKET];
    for (int count = 0; count < BURST; count++) {
        ssize_t length = read(sites[from].device, data, sizeof data);
        if (length <= 0) return;
        if (length < 20 || data[0] >> 4 != 4) continue; /* not IPv4 */
        uint32_t destination;
        memcpy(&destination, data + 16, sizeof destination);
        int to = site_of(destination);
        if (to >= 0 && to != from) enter_link(&links[from][to], data, (size_t)length, now);
    }
}

/* --- requests ----------------------------------------------------------------------------------------------------- */

static void write_stats(char *answer, size_t size) {
    size_t used = 0;
    for (int from = 0; from < site_count; from++)
        for (int to = 0; to < site_count; to++) {
            const struct link *link = &links[from][to];
            if (from == to || used >= size) continue;
            used += (size_t)snprintf(answer + used, size - used,
                                     "%s %s %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", sites[from].name,
                                     sites[to].name, link->packets, link->bytes, link->full, link->lost);
        }
}

static const char *obey(const char *request) {
    char verb[8], from_name[32], to_name[32];
    double rate, delay, jitter, loss, queue;
    int fields = sscanf(request, "%7s %31s %31s %lf %lf %lf %lf %lf", verb, from_name, to_name, &rate, &delay, &jitter,
                        &loss, &queue);
    if (fields < 3) return "not a request";
    int from = find_site(from_name), to = find_site(to_name);
    if (from < 0 || to < 0 || from == to) return "no such link";
    struct link *link = &links[from][to];
    if (!strcmp(verb, "cut") || !strcmp(verb, "heal")) {
        link->cut = !strcmp(verb, "cut");
    } else if (!strcmp(verb, "link") && fields == 8 && rate > 0) {
        link->bits_per_second = rate, link->delay_ns = delay, link->jitter_ns = jitter;
        link->loss = loss, link->queue_bytes = queue;
    } else {
        return "not a request";
    }
    return "ok";
}

static void answer_request(int socket_fd) {
    char request[512], answer[MAX_SITES * MAX_SITES * 128];
    struct sockaddr_un client;
    socklen_t client_length = sizeof client;
    ssize_t length =
        recvfrom(socket_fd, request, sizeof request - 1, MSG_DONTWAIT, (struct sockaddr *)&client, &client_length);
    if (length < 0) return;
    request[length] = 0;
    if (!strcmp(request, "stats")) write_stats(answer, sizeof answer);
    else strcpy(answer, obey(request));
    sendto(socket_fd, answer, strlen(answer), MSG_DONTWAIT, (struct sockaddr *)&client, client_length);
}

static int open_socket(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    errno = ENAMETOOLONG;
    if (strlen(path) >= sizeof address.sun_path) fail(path);
    strcpy(address.sun_path, path);
    umask(077);
    int socket_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (socket_fd < 0 || bind(socket_fd, (struct sockaddr *)&address, sizeof address)) fail(path);
    return socket_fd;
}

/* --- the loop ----------------------------------------------------------------------------------------------------- */

static void forward_until_ended(int socket_fd) {
    struct pollfd inputs[MAX_SITES + 1];
    for (int index = 0; index < site_count; index++)
        inputs[index] = (struct pollfd){.fd = sites[index].device, .events = POLLIN};
    inputs[site_count] = (struct pollfd){.fd = socket_fd, .events = POLLIN};
    while (!ended) {
        uint64_t next_ns = UINT64_MAX, now = now_ns();
        for (int from = 0; from < site_count; from++)
            for (int to = 0; to < site_count; to++) {
                uint64_t arrival_ns = leave_link(&links[from][to], sites[to].device, now);
                if (arrival_ns < next_ns) next_ns = arrival_ns;
            }
        now = now_ns();
        uint64_t wait_ns = next_ns > now ? next_ns - now : 0;
        struct timespec wait = {(time_t)(wait_ns / 1000000000u), (long)(wait_ns % 1000000000u)};
        if (ppoll(inputs, (nfds_t)site_count + 1, next_ns == UINT64_MAX ? NULL : &wait, NULL) <= 0) continue;
        now = now_ns();
        for (int index = 0; index < site_count; index++)
            if (inputs[index].revents & POLLIN) read_site(index, now);
        if (inputs[site_count].revents & POLLIN) answer_request(socket_fd);
    }
}

int main(int count, char **arguments) {
    if (count < 3) {
        fprintf(stderr, "usage: wanem SOCKET SITE,NETWORK_NAMESPACE,PREFIX/LENGTH ...\n");
        return 2;
    }
    for (int index = 2; index < count; index++) add_site(arguments[index]);
    for (int from = 0; from < site_count; from++)
        for (int to = 0; to < site_count; to++) /* carries nothing until it is given a shape */
            links[from][to] = (struct link){.bits_per_second = 1, .loss = 1};
    signal(SIGTERM, on_end);
    signal(SIGINT, on_end);
    prctl(PR_SET_TIMERSLACK, 1000ul); /* ns; the default of 50 us shows in short delays */
    forward_until_ended(open_socket(arguments[1]));
    return 0;
}
