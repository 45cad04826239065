// What libnats sees: checks by name, as in python_client.py. Usage: checks <url> <subject>; prints one JSON object.
#define _GNU_SOURCE
#include <nats/nats.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

enum {
    PATIENCE_MS = 20000,
    // For answers that need not come: a server that does not answer takes all of it.
    SHORT_PATIENCE_MS = 2000,
    PAYLOAD_BYTES = 1 << 20,
    BACKLOG_PAYLOAD_BYTES = 1 << 16,
    CONNECTIONS_MAX = 8,
    MESSAGES_MAX = 2000,
    NAME_BYTES = 200,
    SOCKETS_MAX = 64,
};

// Return what a call returns that fails. Only connections outlive a check, and main closes them.
#define TRY(call)                        \
    do {                                 \
        natsStatus status_ = (call);     \
        if (status_ != NATS_OK)          \
            return status_;              \
    } while (0)

// Takes a subject of its own, and writes what it saw as JSON.
typedef natsStatus (*Check)(const char *subject, FILE *out);

// Counts and keeps what its callback receives.
typedef struct {
    pthread_mutex_t lock;
    int count;
    char *data[MESSAGES_MAX];
} Receiver;

static const char *url;
static natsConnection *opened[CONNECTIONS_MAX];
static int opened_count;
static Receiver receiver;
// Posted when a connection is closed, or has come back.
static sem_t event;

static void on_event(natsConnection *client, void *closure) {
    (void)client, (void)closure;
    sem_post(&event);
}

static void on_message(natsConnection *client, natsSubscription *subscription, natsMsg *message, void *closure) {
    (void)client, (void)subscription, (void)closure;
    pthread_mutex_lock(&receiver.lock);
    if (receiver.count < MESSAGES_MAX)
        receiver.data[receiver.count++] = strndup(natsMsg_GetData(message), (size_t)natsMsg_GetDataLength(message));
    pthread_mutex_unlock(&receiver.lock);
    natsMsg_Destroy(message);
}

static void on_request(natsConnection *client, natsSubscription *subscription, natsMsg *message, void *closure) {
    (void)subscription, (void)closure;
    char answer[NAME_BYTES];
    int bytes = snprintf(answer, sizeof answer, "re: %.*s", natsMsg_GetDataLength(message), natsMsg_GetData(message));
    natsConnection_Publish(client, natsMsg_GetReply(message), answer, bytes);
    natsMsg_Destroy(message);
}

static natsStatus new_options(natsOptions **options) {
    TRY(natsOptions_Create(options));
    TRY(natsOptions_SetURL(*options, url));
    TRY(natsOptions_SetTimeout(*options, PATIENCE_MS));
    return natsOptions_SetAllowReconnect(*options, false);
}

static natsStatus connect_with(natsConnection **client, natsOptions *options) {
    TRY(natsConnection_Connect(client, options));
    opened[opened_count++] = *client;
    return NATS_OK;
}

static natsStatus connect_plainly(natsConnection **client) {
    natsOptions *options;
    TRY(new_options(&options));
    return connect_with(client, options);
}

static natsStatus connect_no_echo(natsConnection **client) {
    natsOptions *options;
    TRY(new_options(&options));
    TRY(natsOptions_SetNoEcho(options, true));
    return connect_with(client, options);
}

static natsStatus await_event(void) {
    struct timespec deadline;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += PATIENCE_MS / 1000;
    return sem_timedwait(&event, &deadline) == 0 ? NATS_OK : NATS_TIMEOUT;
}

static const char *under(const char *subject, const char *tokens) {
    static char names[4][NAME_BYTES];
    static int used;
    char *name = names[used++ % 4];
    snprintf(name, NAME_BYTES, "%s.%s", subject, tokens);
    return name;
}

static natsStatus publish(natsConnection *client, const char *subject, int count) {
    for (int number = 0; number < count; number++) {
        char data[16];
        snprintf(data, sizeof data, "%d", number);
        TRY(natsConnection_PublishString(client, subject, data));
    }
    return NATS_OK;
}

static void write_status(FILE *out, natsStatus status) {
    fprintf(out, "\"%s\"", natsStatus_GetText(status));
}

// Wait for messages and write them as a list.
static natsStatus write_next(FILE *out, natsSubscription *subscription, int count) {
    fprintf(out, "[");
    for (int number = 0; number < count; number++) {
        natsMsg *message;
        TRY(natsSubscription_NextMsg(&message, subscription, PATIENCE_MS));
        fprintf(out, "%s\"%.*s\"", number ? "," : "", natsMsg_GetDataLength(message), natsMsg_GetData(message));
        natsMsg_Destroy(message);
    }
    fprintf(out, "]");
    return NATS_OK;
}

static void write_received(FILE *out) {
    pthread_mutex_lock(&receiver.lock);
    fprintf(out, "[");
    for (int number = 0; number < receiver.count; number++)
        fprintf(out, "%s\"%s\"", number ? "," : "", receiver.data[number]);
    fprintf(out, "]");
    pthread_mutex_unlock(&receiver.lock);
}

static int by_text(const void *one, const void *two) {
    return strcmp(*(char *const *)one, *(char *const *)two);
}

static natsStatus write_requests(FILE *out, natsConnection *client, const char *subject) {
    fprintf(out, "[");
    for (int number = 0; number < 10; number++) {
        char data[16];
        natsMsg *reply;
        snprintf(data, sizeof data, "%d", number);
        TRY(natsConnection_RequestString(&reply, client, subject, data, PATIENCE_MS));
        fprintf(out, "%s\"%.*s\"", number ? "," : "", natsMsg_GetDataLength(reply), natsMsg_GetData(reply));
        natsMsg_Destroy(reply);
    }
    fprintf(out, "]");
    return NATS_OK;
}

static natsStatus info(const char *subject, FILE *out) {
    natsConnection *client;
    (void)subject;
    TRY(connect_plainly(&client));
    fprintf(out, "[%lld,", (long long)natsConnection_GetMaxPayload(client));
    write_status(out, natsConnection_HasHeaderSupport(client));
    fprintf(out, "]");
    return NATS_OK;
}

static natsStatus publish_subscribe(const char *subject, FILE *out) {
    natsConnection *client, *other;
    natsSubscription *star, *rest;
    TRY(connect_plainly(&client));
    TRY(connect_plainly(&other));
    TRY(natsConnection_SubscribeSync(&star, client, under(subject, "*")));
    TRY(natsConnection_SubscribeSync(&rest, client, under(subject, ">")));
    TRY(natsConnection_Flush(client));
    TRY(publish(other, under(subject, "a"), 3));
    TRY(publish(other, under(subject, "a.b"), 3));
    fprintf(out, "[");
    TRY(write_next(out, star, 3));
    fprintf(out, ",");
    TRY(write_next(out, rest, 6));
    fprintf(out, "]");
    return NATS_OK;
}

static natsStatus order_over_subjects(const char *subject, FILE *out) {
    natsConnection *client;
    natsSubscription *subscription;
    const char *tokens[] = {"a", "b", "c"};
    TRY(connect_plainly(&client));
    TRY(natsConnection_SubscribeSync(&subscription, client, under(subject, ">")));
    for (int number = 0; number < 100; number++) {
        char data[16];
        snprintf(data, sizeof data, "%d", number);
        TRY(natsConnection_PublishString(client, under(subject, tokens[number % 3]), data));
    }
    return write_next(out, subscription, 100);
}

static natsStatus drain_a_subscription(const char *subject, FILE *out) {
    natsConnection *client;
    natsSubscription *subscription;
    TRY(connect_plainly(&client));
    TRY(natsConnection_Subscribe(&subscription, client, subject, on_message, NULL));
    TRY(publish(client, subject, 100));
    TRY(natsSubscription_Drain(subscription));
    TRY(natsSubscription_WaitForDrainCompletion(subscription, PATIENCE_MS));
    write_received(out);
    return NATS_OK;
}

static natsStatus drain_a_connection(const char *subject, FILE *out) {
    natsOptions *options;
    natsConnection *client;
    natsSubscription *subscription;
    TRY(new_options(&options));
    TRY(natsOptions_SetClosedCB(options, on_event, NULL));
    TRY(connect_with(&client, options));
    TRY(natsConnection_Subscribe(&subscription, client, subject, on_message, NULL));
    TRY(publish(client, subject, 100));
    TRY(natsConnection_DrainTimeout(client, PATIENCE_MS));
    TRY(await_event());
    write_received(out);
    return NATS_OK;
}

static natsStatus drain_what_another_published(const char *subject, FILE *out) {
    natsConnection *client, *other;
    natsSubscription *subscription;
    TRY(connect_plainly(&client));
    TRY(connect_plainly(&other));
    TRY(natsConnection_Subscribe(&subscription, client, subject, on_message, NULL));
    TRY(natsConnection_Flush(client));
    TRY(publish(other, subject, 1000));
    TRY(natsConnection_Flush(other));
    TRY(natsSubscription_Drain(subscription));
    TRY(natsSubscription_WaitForDrainCompletion(subscription, PATIENCE_MS));
    write_received(out);
    return NATS_OK;
}

static natsStatus drain_a_backlog(const char *subject, FILE *out) {
    natsConnection *client, *other;
    natsSubscription *subscription;
    char *payload = calloc(1, BACKLOG_PAYLOAD_BYTES);
    TRY(connect_plainly(&client));
    TRY(connect_plainly(&other));
    TRY(natsConnection_Subscribe(&subscription, client, subject, on_message, NULL));
    TRY(natsConnection_Flush(client));
    for (int number = 0; number < 300; number++) {
        snprintf(payload, BACKLOG_PAYLOAD_BYTES, "%d", number);
        TRY(natsConnection_Publish(other, subject, payload, BACKLOG_PAYLOAD_BYTES));
    }
    TRY(natsConnection_Flush(other));
    TRY(natsSubscription_Drain(subscription));
    TRY(natsSubscription_WaitForDrainCompletion(subscription, PATIENCE_MS));
    write_received(out);
    return NATS_OK;
}

static natsStatus drain_a_responder(const char *subject, FILE *out) {
    natsConnection *client, *service;
    natsSubscription *requests, *replies;
    natsInbox *inbox;
    TRY(connect_plainly(&client));
    TRY(connect_plainly(&service));
    TRY(natsConnection_Subscribe(&requests, service, subject, on_request, NULL));
    TRY(natsConnection_Flush(service));
    TRY(natsInbox_Create(&inbox));
    TRY(natsConnection_SubscribeSync(&replies, client, inbox));
    for (int number = 0; number < 100; number++) {
        char data[16];
        snprintf(data, sizeof data, "%d", number);
        TRY(natsConnection_PublishRequestString(client, subject, inbox, data));
    }
    TRY(natsConnection_Flush(client));
    TRY(natsConnection_DrainTimeout(service, PATIENCE_MS));
    return write_next(out, replies, 100);
}

static natsStatus close_after_publish(const char *subject, FILE *out) {
    natsConnection *client, *other;
    natsSubscription *subscription;
    TRY(connect_plainly(&client));
    TRY(connect_plainly(&other));
    TRY(natsConnection_SubscribeSync(&subscription, client, subject));
    TRY(natsConnection_Flush(client));
    TRY(publish(other, subject, 100));
    natsConnection_Close(other);
    return write_next(out, subscription, 100);
}

static natsStatus unsubscribe_after_max(const char *subject, FILE *out) {
    natsConnection *client;
    natsSubscription *subscription;
    natsMsg *message;
    TRY(connect_plainly(&client));
    TRY(natsConnection_SubscribeSync(&subscription, client, subject));
    TRY(natsSubscription_AutoUnsubscribe(subscription, 3));
    TRY(publish(client, subject, 5));
    TRY(natsConnection_Flush(client));
    fprintf(out, "[");
    TRY(write_next(out, subscription, 3));
    fprintf(out, ",");
    write_status(out, natsSubscription_NextMsg(&message, subscription, PATIENCE_MS));
    fprintf(out, "]");
    return NATS_OK;
}

static natsStatus flush_then_next(const char *subject, FILE *out) {
    natsConnection *client;
    natsSubscription *subscription;
    uint64_t waiting;
    TRY(connect_plainly(&client));
    TRY(natsConnection_SubscribeSync(&subscription, client, subject));
    TRY(natsConnection_PublishString(client, subject, "hello"));
    TRY(natsConnection_Flush(client));
    TRY(natsSubscription_QueuedMsgs(subscription, &waiting));
    fprintf(out, "[%d,", (int)waiting);
    TRY(write_next(out, subscription, 1));
    fprintf(out, "]");
    return NATS_OK;
}

static natsStatus answer_requests(const char *subject) {
    natsConnection *service;
    natsSubscription *subscription;
    TRY(connect_plainly(&service));
    TRY(natsConnection_Subscribe(&subscription, service, subject, on_request, NULL));
    return natsConnection_Flush(service);
}

static natsStatus request(const char *subject, FILE *out) {
    natsConnection *client;
    TRY(answer_requests(subject));
    TRY(connect_plainly(&client));
    return write_requests(out, client, subject);
}

static natsStatus request_in_the_old_style(const char *subject, FILE *out) {
    natsOptions *options;
    natsConnection *client;
    TRY(answer_requests(subject));
    TRY(new_options(&options));
    TRY(natsOptions_UseOldRequestStyle(options, true));
    TRY(connect_with(&client, options));
    return write_requests(out, client, subject);
}

static natsStatus request_without_a_reply(const char *subject, FILE *out) {
    natsConnection *client, *service;
    natsSubscription *subscription;
    natsMsg *reply;
    TRY(connect_plainly(&client));
    TRY(connect_plainly(&service));
    TRY(natsConnection_SubscribeSync(&subscription, service, subject));
    TRY(natsConnection_Flush(service));
    write_status(out, natsConnection_RequestString(&reply, client, subject, "", 100));
    return NATS_OK;
}

static natsStatus no_responders(const char *subject, FILE *out) {
    natsConnection *client;
    natsMsg *reply;
    TRY(connect_plainly(&client));
    write_status(out, natsConnection_RequestString(&reply, client, subject, "", PATIENCE_MS));
    return NATS_OK;
}

static natsStatus no_responders_but_oneself(const char *subject, FILE *out) {
    natsConnection *client;
    natsSubscription *subscription;
    natsMsg *reply;
    TRY(connect_no_echo(&client));
    TRY(natsConnection_SubscribeSync(&subscription, client, subject));
    TRY(natsConnection_Flush(client));
    write_status(out, natsConnection_RequestString(&reply, client, subject, "", SHORT_PATIENCE_MS));
    return NATS_OK;
}

static natsStatus no_echo(const char *subject, FILE *out) {
    natsConnection *client, *other;
    natsSubscription *subscription;
    TRY(connect_no_echo(&client));
    TRY(connect_plainly(&other));
    TRY(natsConnection_SubscribeSync(&subscription, client, subject));
    TRY(natsConnection_PublishString(client, subject, "own"));
    TRY(natsConnection_Flush(client));
    TRY(natsConnection_PublishString(other, subject, "other's"));
    return write_next(out, subscription, 1);
}

static natsStatus headers(const char *subject, FILE *out) {
    natsConnection *client;
    natsSubscription *subscription;
    natsMsg *message, *received;
    const char **values, *words;
    int count;
    TRY(connect_plainly(&client));
    TRY(natsConnection_SubscribeSync(&subscription, client, subject));
    TRY(natsMsg_Create(&message, subject, NULL, "hello", 5));
    TRY(natsMsgHeader_Add(message, "A", "1"));
    TRY(natsMsgHeader_Add(message, "A", "2"));
    TRY(natsMsgHeader_Set(message, "b", "two words"));
    TRY(natsConnection_PublishMsg(client, message));
    TRY(natsSubscription_NextMsg(&received, subscription, PATIENCE_MS));
    TRY(natsMsgHeader_Values(received, "A", &values, &count));
    fprintf(out, "[\"%s\"", natsMsg_GetData(received));
    for (int number = 0; number < count; number++)
        fprintf(out, ",\"%s\"", values[number]);
    TRY(natsMsgHeader_Get(received, "b", &words));
    fprintf(out, ",\"%s\"]", words);
    return NATS_OK;
}

// Two clients subscribe, the first to the first two patterns; another one publishes.
static natsStatus receive_in_a_group(const char *patterns[3], const char *subject, FILE *out) {
    natsConnection *clients[2], *publisher;
    natsSubscription *members[3];
    TRY(connect_plainly(&clients[0]));
    TRY(connect_plainly(&clients[1]));
    TRY(connect_plainly(&publisher));
    for (int number = 0; number < 3; number++) {
        natsConnection *client = clients[number / 2];
        TRY(natsConnection_QueueSubscribe(&members[number], client, patterns[number], "workers", on_message, NULL));
        TRY(natsConnection_Flush(client));
    }
    TRY(publish(publisher, subject, 100));
    TRY(natsConnection_Flush(publisher));
    for (int number = 0; number < 3; number++)
        TRY(natsSubscription_Drain(members[number]));
    for (int number = 0; number < 3; number++)
        TRY(natsSubscription_WaitForDrainCompletion(members[number], PATIENCE_MS));
    qsort(receiver.data, (size_t)receiver.count, sizeof *receiver.data, by_text);
    write_received(out);
    return NATS_OK;
}

static natsStatus queue_group(const char *subject, FILE *out) {
    return receive_in_a_group((const char *[]){subject, subject, subject}, subject, out);
}

static natsStatus queue_group_on_overlapping_patterns(const char *subject, FILE *out) {
    const char *star = under(subject, "*"), *rest = under(subject, ">"), *one = under(subject, "a");
    return receive_in_a_group((const char *[]){star, one, rest}, one, out);
}

static natsStatus largest_payload(const char *subject, FILE *out) {
    natsConnection *client;
    natsSubscription *subscription;
    natsMsg *message;
    char *payload = calloc(1, PAYLOAD_BYTES + 1);
    TRY(connect_plainly(&client));
    TRY(natsConnection_SubscribeSync(&subscription, client, subject));
    TRY(natsConnection_Publish(client, subject, payload, PAYLOAD_BYTES));
    TRY(natsSubscription_NextMsg(&message, subscription, PATIENCE_MS));
    fprintf(out, "[%d,", natsMsg_GetDataLength(message));
    write_status(out, natsConnection_Publish(client, subject, payload, PAYLOAD_BYTES + 1));
    fprintf(out, "]");
    return NATS_OK;
}

static natsStatus invalid_subjects(const char *subject, FILE *out) {
    natsConnection *client;
    natsSubscription *subscription;
    uint64_t waiting;
    TRY(connect_plainly(&client));
    TRY(natsConnection_SubscribeSync(&subscription, client, under(subject, ">")));
    fprintf(out, "[");
    write_status(out, natsConnection_PublishString(client, under(subject, ".x"), "0"));
    fprintf(out, ",");
    write_status(out, natsConnection_PublishString(client, under(subject, "*"), "1"));
    fprintf(out, ",");
    write_status(out, natsConnection_Flush(client));
    TRY(natsSubscription_QueuedMsgs(subscription, &waiting));
    fprintf(out, ",%d,%s]", (int)waiting, natsConnection_IsClosed(client) ? "true" : "false");
    return NATS_OK;
}

// Penstock refuses the first message, as it cannot store it; the client goes on.
static natsStatus publish_with_an_invalid_delay(const char *subject, FILE *out) {
    natsConnection *client;
    natsSubscription *subscription;
    natsMsg *message;
    TRY(connect_plainly(&client));
    TRY(natsMsg_Create(&message, subject, NULL, "", 0));
    TRY(natsMsgHeader_Set(message, "Delay", "soon"));
    TRY(natsConnection_PublishMsg(client, message));
    TRY(natsConnection_Flush(client));
    TRY(natsConnection_SubscribeSync(&subscription, client, subject));
    TRY(publish(client, subject, 3));
    return write_next(out, subscription, 3);
}

static natsStatus pedantic(const char *subject, FILE *out) {
    natsOptions *options;
    natsConnection *client;
    const char *error;
    TRY(new_options(&options));
    TRY(natsOptions_SetPedantic(options, true));
    TRY(natsOptions_SetClosedCB(options, on_event, NULL));
    TRY(connect_with(&client, options));
    TRY(natsConnection_PublishString(client, under(subject, "*"), "0"));
    TRY(await_event());
    natsConnection_GetLastError(client, &error);
    fprintf(out, "\"%s\"", error);
    return NATS_OK;
}

static natsStatus verbose(const char *subject, FILE *out) {
    natsOptions *options;
    natsConnection *client;
    natsSubscription *subscription;
    TRY(new_options(&options));
    TRY(natsOptions_SetVerbose(options, true));
    TRY(connect_with(&client, options));
    TRY(natsConnection_SubscribeSync(&subscription, client, subject));
    TRY(publish(client, subject, 100));
    TRY(natsConnection_Flush(client));
    return write_next(out, subscription, 100);
}

// Cut every TCP connection of this process, as a broken network does: libnats does not hand out its sockets.
static void cut_connections(void) {
    for (int number = 0; number < SOCKETS_MAX; number++) {
        struct sockaddr_storage address;
        socklen_t bytes = sizeof address;
        if (getpeername(number, (struct sockaddr *)&address, &bytes) == 0 && address.ss_family == AF_INET)
            shutdown(number, SHUT_RDWR);
    }
}

static natsStatus reconnect(const char *subject, FILE *out) {
    natsOptions *options;
    natsConnection *client, *other;
    natsSubscription *plain, *limited;
    TRY(new_options(&options));
    TRY(natsOptions_SetAllowReconnect(options, true));
    TRY(natsOptions_SetReconnectWait(options, 1));
    TRY(natsOptions_SetReconnectedCB(options, on_event, NULL));
    TRY(connect_with(&client, options));
    TRY(natsConnection_SubscribeSync(&plain, client, subject));
    TRY(natsConnection_SubscribeSync(&limited, client, subject));
    TRY(natsSubscription_AutoUnsubscribe(limited, 3));
    TRY(publish(client, subject, 2));
    TRY(natsConnection_Flush(client));
    cut_connections();
    TRY(await_event());
    TRY(natsConnection_Flush(client));
    TRY(connect_plainly(&other));
    TRY(publish(other, subject, 3));
    fprintf(out, "[");
    TRY(write_next(out, plain, 5));
    fprintf(out, ",");
    TRY(write_next(out, limited, 3));
    fprintf(out, "]");
    return NATS_OK;
}

static natsStatus jetstream_is_not_there(const char *subject, FILE *out) {
    natsConnection *client;
    jsCtx *stream;
    jsStreamConfig config;
    jsPubAck *ack;
    jsErrCode code = 0;
    TRY(connect_plainly(&client));
    TRY(natsConnection_JetStream(&stream, client, NULL));
    TRY(jsStreamConfig_Init(&config));
    config.Name = "S";
    config.Subjects = &subject;
    config.SubjectsLen = 1;
    fprintf(out, "[");
    write_status(out, js_AddStream(NULL, stream, &config, NULL, &code));
    fprintf(out, ",%d,", (int)code);
    write_status(out, js_Publish(&ack, stream, subject, "", 0, NULL, &code));
    fprintf(out, "]");
    return NATS_OK;
}

static const struct {
    const char *name;
    Check check;
} checks[] = {
#define CHECK(name) {#name, name}
    CHECK(info),
    CHECK(publish_subscribe),
    CHECK(order_over_subjects),
    CHECK(drain_a_subscription),
    CHECK(drain_a_connection),
    CHECK(drain_what_another_published),
    CHECK(drain_a_backlog),
    CHECK(drain_a_responder),
    CHECK(close_after_publish),
    CHECK(unsubscribe_after_max),
    CHECK(flush_then_next),
    CHECK(request),
    CHECK(request_in_the_old_style),
    CHECK(request_without_a_reply),
    CHECK(no_responders),
    CHECK(no_responders_but_oneself),
    CHECK(no_echo),
    CHECK(headers),
    CHECK(queue_group),
    CHECK(queue_group_on_overlapping_patterns),
    CHECK(largest_payload),
    CHECK(invalid_subjects),
    CHECK(publish_with_an_invalid_delay),
    CHECK(pedantic),
    CHECK(verbose),
    CHECK(reconnect),
    CHECK(jetstream_is_not_there),
};

int main(int count, char **words) {
    if (count != 3)
        return 2;
    url = words[1];
    sem_init(&event, 0, 0);
    pthread_mutex_init(&receiver.lock, NULL);
    for (size_t number = 0; number < sizeof checks / sizeof *checks; number++) {
        char subject[NAME_BYTES], *found;
        size_t bytes;
        snprintf(subject, sizeof subject, "%s.%s", words[2], checks[number].name);
        FILE *out = open_memstream(&found, &bytes);
        natsStatus status = checks[number].check(subject, out);
        fclose(out);
        printf("%s\"%s\":", number ? "," : "{", checks[number].name);
        if (status == NATS_OK)
            printf("%s", found);
        else
            printf("\"failed: %s\"", natsStatus_GetText(status));
        while (opened_count > 0)
            natsConnection_Destroy(opened[--opened_count]);
        pthread_mutex_lock(&receiver.lock);
        receiver.count = 0;
        pthread_mutex_unlock(&receiver.lock);
        while (sem_trywait(&event) == 0)
            ;
    }
    printf("}\n");
    return 0;
}
