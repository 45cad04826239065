"""QB, the Python broker's protocol: messages with properties, in frames that begin with their length.

The Python broker's clients speak it, and `penstock.client.qb`. `wire/qb.py` draws a message. There are nine kinds:

    CREATE_TOPIC         topic, partitions?, retention_hours?                    → ACK
    PUBLISH              topic, partition?, and properties that stay with it     → ACK with the offset, once stored
    CREATE_SUBSCRIPTION  subscription_id, topic, start_offset?                   → ACK
    DELETE_SUBSCRIPTION  subscription_id                                         → ACK
    SUBSCRIBE            subscription_id, subscriber_id, auto_ack?               → ACK, then DATA
    UNSUBSCRIBE          subscriber_id, subscription_id?                         → ACK
    HEARTBEAT            user and password, or token, if the broker wants them   → HEARTBEAT
    ACK                  of a DATA: subscription_id, topic, partition, status?   not answered

A request has a sequence that its client chose, and its ACK has the same, with `status=success`, or `status=error` and
`error`. Requests are answered as soon as their answer is known; messages that are published keep their order.

A subscription is a shared group. A client of this protocol does not acknowledge, so a message is done when it is handed
to its connection. A client that says `auto_ack=false` acknowledges each message before `ack_deadline_ms`, or sends
`status=pending` if it needs more time; other messages are redelivered. Messages that a client has when it sends
UNSUBSCRIBE go to the other subscribers, and count as not delivered.
"""
