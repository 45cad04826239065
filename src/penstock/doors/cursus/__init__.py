"""Cursus' protocol: commands in text and batches, in frames that begin with their length.

Cursus' clients speak it, and `penstock shell`. `wire/cursus.py` draws batches and lists the commands.

    C: CREATE orders 4                             S: ✅ Topic 'orders' now has 4 partitions
    C: PUBLISH orders hello                        S: 📤 Published to 'orders'
    C: PUBLISH topic=orders key=k message=hello    S: {"status": "OK", "last_offset": 7, …}
    C: CONSUME topic=orders partition=0 offset=0   S: a batch

Commands are handled and answered one after the other. A failure is `ERROR: <text>`. A client packs its frames with
gzip, lz4 or snappy if it likes, and is answered in the same way.

A command has its arguments in order, as in Cursus' documents, or with their names. Asked in order, messages come as
they are, one in each frame; asked by name, they come in batches, with offsets and keys. A CONSUME in order ends with
the connection, because nothing else could say that no more messages come. A CONSUME that follows, and STREAM, continue
until the next command.

A group is a partitioned group of Penstock, named `<topic>:<group>`; partition p belongs to consumer p % consumers.
SUBSCRIBE makes this connection one or more of its members: what they are sent is committed. JOIN_GROUP makes it a
member that reads with CONSUME and commits with COMMIT_OFFSET. A member that joined and is silent loses its partitions
after the session timeout, even while its connection lasts; one that subscribed keeps them as long as its connection.

    dialect     the match over the commands; topics
    producing   PUBLISH and batches
    consuming   CONSUME and STREAM
    groups      the commands of groups
    arguments   reading the arguments of commands
"""
