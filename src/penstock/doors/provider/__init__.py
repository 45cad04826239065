"""The Provider's protocol: frames of types 0x01 to 0x0C, most of them JSON, in the framing of `doors/binary`.

The clients of the Provider speak it. They cannot authenticate, so a broker with credentials closes their connection.

    DATA           from a client {topic, msg_key, event_type, data} → ACK; to it [{msgKey, eventType, data, createdAt}]
    ACK            of a DATA that the client was sent: all of its messages are done
    SUBSCRIBE      {topic, group} → ACK, then DATA from the position of the group on
    COMMIT_OFFSET  {topic, offset} → ACK: all messages below the offset are done
    RESET, READY   to a client {topic} → ACK, or RESET_ACK and READY_ACK: forget the topic, it is sent again; it was
    BATCH_HEADER   to a client that has sent READY_ACK with the names of topic and group: instead of DATA
    BATCH_ACK      of the oldest batch of that topic and group that is not acknowledged: all of its messages are done

Later versions of the Provider have the last two. Their clients number acknowledgements themselves, so the names in one
and the order of the batches tell which batch it is for. They subscribe as earlier clients do, and expect a READY first.
With `server.provider_ready` the subscription begins when READY is answered, and the answer tells the two kinds apart.

A group is a shared group of Penstock, named `<topic>:<group>`. It is remembered, and begins with the first message that
is stored. A message without an ACK is redelivered until it has one: the protocol has no dead letters, so there are some
only if the topic has a `deliveries_max`. All clients are told of a refresh.

What differs from Penstock's own frames: there is no ERROR, so a failure is DISCONNECT, and the connection closes.
"""
