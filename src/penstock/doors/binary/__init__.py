"""Penstock's own protocol: frames, `[type][id][length][payload]`, that carry batches as they are stored.

Penstock's clients, the embedded broker and `penstock` commands speak it. `wire/binary.py` draws the frames. It shares
its first types with the Provider's protocol, which is a dialect of its own; HELLO as the first frame tells them apart.

    C: HELLO {version, name, user, password}       S: RESULT {server_id, payload_bytes_max, …}
    C: CALL {"call": "resolve", "subject": …}      S: RESULT {topic, id, partitions}
    C: APPEND topic, partition, a batch            S: RESULT {offset} when it is as durable as its topic promises
    C: OPEN {subscription, pattern, credit}        S: RESULT {positions}
                                                   S: MESSAGES a batch, as long as there is credit
    C: CREDIT subscription, messages
    C: SETTLE offsets of a group                   S: RESULT when that is stored

A request carries an ID, and its reply the same one. Requests are pipelined and answered as soon as their answer is
known, in any order; only published messages keep their order. An error is an ERROR frame with a code and a text. Before
HELLO, and where no request can be blamed, it is DISCONNECT, and the connection closes.

    dialect     the match over the frames: HELLO, OPEN, CREDIT, SETTLE, CALL
    frames      the codec, and what the Provider's dialect shares with this one
    producing   APPEND, PUBLISH and STAGE: check a batch, in a worker if it is large, and store it
    reading     FETCH, and snapshots: SNAPSHOT and READ
    opening     the fields of OPEN
"""
