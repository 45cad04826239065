// What nats.go sees: checks by name, as in python_client.py. Usage: checks <url> <subject>; prints one JSON object.
package main

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"sort"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
)

const (
	patience = 20 * time.Second
	// For answers that need not come: a server that does not answer takes all of it.
	shortPatience = 2 * time.Second
	payloadBytes  = 1 << 20
	// 300 of these are more than the buffers of a connection hold.
	backlogPayloadBytes = 1 << 16
)

// Holds the connections of one check, which end with it.
type connections struct {
	url    string
	opened []*nats.Conn
}

type check func(c *connections, subject string) any

func (c *connections) connect(options ...nats.Option) *nats.Conn {
	all := append([]nats.Option{nats.NoReconnect(), nats.Timeout(patience), nats.DrainTimeout(patience)}, options...)
	client := must(nats.Connect(c.url, all...))
	c.opened = append(c.opened, client)
	return client
}

func (c *connections) close() {
	for _, client := range c.opened {
		client.Close()
	}
}

// Keeps what its method take receives.
type receiver struct {
	sync.Mutex
	data []string
}

func (r *receiver) take(message *nats.Msg) {
	r.Lock()
	defer r.Unlock()
	r.data = append(r.data, string(message.Data))
}

func (r *receiver) received() []string {
	r.Lock()
	defer r.Unlock()
	return append([]string{}, r.data...)
}

func must[T any](value T, err error) T {
	ok(err)
	return value
}

func ok(err error) {
	if err != nil {
		panic(err)
	}
}

func text(err error) any {
	if err == nil {
		return nil
	}
	return err.Error()
}

func publish(client *nats.Conn, subject string, count int) {
	for number := 0; number < count; number++ {
		ok(client.Publish(subject, []byte(strconv.Itoa(number))))
	}
}

func next(subscription *nats.Subscription, count int) []string {
	found := []string{}
	for len(found) < count {
		found = append(found, string(must(subscription.NextMsg(patience)).Data))
	}
	return found
}

func until(holds func() bool) {
	for deadline := time.Now().Add(patience); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			panic(nats.ErrTimeout)
		}
	}
}

func drained(clients ...*nats.Conn) {
	for _, client := range clients {
		ok(client.Drain())
	}
	for _, client := range clients {
		until(client.IsClosed)
	}
}

func respond(message *nats.Msg) {
	ok(message.Respond(append([]byte("re: "), message.Data...)))
}

func requests(client *nats.Conn, subject string) any {
	found := []string{}
	for number := 0; number < 10; number++ {
		found = append(found, string(must(client.Request(subject, []byte(strconv.Itoa(number)), patience)).Data))
	}
	return found
}

var checks = map[string]check{
	"info": func(c *connections, _ string) any {
		client := c.connect()
		return []any{client.MaxPayload(), client.HeadersSupported(), client.TLSRequired(), client.AuthRequired()}
	},
	"publish_subscribe": func(c *connections, subject string) any {
		client, other := c.connect(), c.connect()
		star := must(client.SubscribeSync(subject + ".*"))
		rest := must(client.SubscribeSync(subject + ".>"))
		ok(client.Flush())
		publish(other, subject+".a", 3)
		publish(other, subject+".a.b", 3)
		return [][]string{next(star, 3), next(rest, 6)}
	},
	"order_over_subjects": func(c *connections, subject string) any {
		client := c.connect()
		subscription := must(client.SubscribeSync(subject + ".>"))
		for number := 0; number < 100; number++ {
			ok(client.Publish(fmt.Sprintf("%s.%d", subject, number%3), []byte(strconv.Itoa(number))))
		}
		return next(subscription, 100)
	},
	"drain_a_subscription": func(c *connections, subject string) any {
		client, receive := c.connect(), receiver{}
		subscription := must(client.Subscribe(subject, receive.take))
		publish(client, subject, 100)
		ok(subscription.Drain())
		until(func() bool { return !subscription.IsValid() })
		return receive.received()
	},
	"drain_a_connection": func(c *connections, subject string) any {
		client, receive := c.connect(), receiver{}
		must(client.Subscribe(subject, receive.take))
		publish(client, subject, 100)
		drained(client)
		return receive.received()
	},
	"drain_what_another_published": func(c *connections, subject string) any {
		client, other, receive := c.connect(), c.connect(), receiver{}
		subscription := must(client.Subscribe(subject, receive.take))
		ok(client.Flush())
		publish(other, subject, 1000)
		ok(other.Flush())
		ok(subscription.Drain())
		until(func() bool { return !subscription.IsValid() })
		return receive.received()
	},
	"drain_a_backlog": func(c *connections, subject string) any {
		client, other, found := c.connect(), c.connect(), []byte{}
		subscription := must(client.Subscribe(subject, func(message *nats.Msg) { found = append(found, message.Data[0]) }))
		ok(client.Flush())
		payload := make([]byte, backlogPayloadBytes)
		for number := 0; number < 300; number++ {
			payload[0] = byte(number)
			ok(other.Publish(subject, payload))
		}
		ok(other.Flush())
		ok(subscription.Drain())
		until(func() bool { return !subscription.IsValid() })
		return found
	},
	"drain_while_another_publishes": func(c *connections, subject string) any {
		client, other, receive := c.connect(), c.connect(), receiver{}
		subscription := must(client.Subscribe(subject, receive.take))
		ok(client.Flush())
		publish(other, subject, 500)
		ok(other.Flush())
		ended := make(chan error)
		go func() {
			var err error
			for number := 500; number < 1000 && err == nil; number++ {
				err = other.Publish(subject, []byte(strconv.Itoa(number)))
			}
			ended <- err
		}()
		ok(subscription.Drain())
		until(func() bool { return !subscription.IsValid() })
		ok(<-ended)
		// How many of the rest arrive is a matter of time; none before them is missing.
		found := receive.received()
		for number, data := range found {
			if data != strconv.Itoa(number) {
				return found
			}
		}
		return len(found) >= 500
	},
	"drain_a_responder": func(c *connections, subject string) any {
		client, service := c.connect(), c.connect()
		must(service.Subscribe(subject, respond))
		ok(service.Flush())
		inbox := nats.NewInbox()
		replies := must(client.SubscribeSync(inbox))
		for number := 0; number < 100; number++ {
			ok(client.PublishRequest(subject, inbox, []byte(strconv.Itoa(number))))
		}
		ok(client.Flush())
		drained(service)
		return next(replies, 100)
	},
	"close_after_publish": func(c *connections, subject string) any {
		client, other := c.connect(), c.connect()
		subscription := must(client.SubscribeSync(subject))
		ok(client.Flush())
		publish(other, subject, 100)
		other.Close()
		return next(subscription, 100)
	},
	"unsubscribe_after_max": func(c *connections, subject string) any {
		client := c.connect()
		subscription := must(client.SubscribeSync(subject))
		ok(subscription.AutoUnsubscribe(3))
		publish(client, subject, 5)
		ok(client.Flush())
		found := next(subscription, 3)
		_, err := subscription.NextMsg(patience)
		return []any{found, text(err)}
	},
	"unsubscribe": func(c *connections, subject string) any {
		client := c.connect()
		gone, left := must(client.SubscribeSync(subject)), must(client.SubscribeSync(subject))
		ok(client.Flush())
		ok(gone.Unsubscribe())
		publish(client, subject, 3)
		return []any{next(left, 3), client.NumSubscriptions(), client.Stats().InMsgs}
	},
	"flush_then_next": func(c *connections, subject string) any {
		client := c.connect()
		subscription := must(client.SubscribeSync(subject))
		ok(client.Publish(subject, []byte("hello")))
		ok(client.Flush())
		waiting, _, err := subscription.Pending()
		ok(err)
		return []any{waiting, next(subscription, 1)}
	},
	"request": func(c *connections, subject string) any {
		client, service := c.connect(), c.connect()
		must(service.Subscribe(subject, respond))
		ok(service.Flush())
		return requests(client, subject)
	},
	"request_in_the_old_style": func(c *connections, subject string) any {
		client, service := c.connect(nats.UseOldRequestStyle()), c.connect()
		must(service.Subscribe(subject, respond))
		ok(service.Flush())
		return requests(client, subject)
	},
	"request_without_a_reply": func(c *connections, subject string) any {
		client, service := c.connect(), c.connect()
		must(service.SubscribeSync(subject))
		ok(service.Flush())
		_, err := client.Request(subject, nil, 100*time.Millisecond)
		return text(err)
	},
	"no_responders": func(c *connections, subject string) any {
		_, err := c.connect().Request(subject, nil, patience)
		return text(err)
	},
	"no_responders_but_oneself": func(c *connections, subject string) any {
		client := c.connect(nats.NoEcho())
		must(client.SubscribeSync(subject))
		ok(client.Flush())
		_, err := client.Request(subject, nil, shortPatience)
		return text(err)
	},
	"no_echo": func(c *connections, subject string) any {
		client, other := c.connect(nats.NoEcho()), c.connect()
		subscription := must(client.SubscribeSync(subject))
		ok(client.Publish(subject, []byte("own")))
		ok(client.Flush())
		ok(other.Publish(subject, []byte("other's")))
		return next(subscription, 1)
	},
	"headers": func(c *connections, subject string) any {
		client := c.connect()
		subscription := must(client.SubscribeSync(subject))
		message := nats.NewMsg(subject)
		message.Data = []byte("hello")
		message.Header.Add("A", "1")
		message.Header.Add("A", "2")
		message.Header.Set("b", "two words")
		ok(client.PublishMsg(message))
		received := must(subscription.NextMsg(patience))
		return []any{string(received.Data), received.Header}
	},
	"queue_group": func(c *connections, subject string) any {
		one, two, publisher, receive := c.connect(), c.connect(), c.connect(), receiver{}
		for _, client := range []*nats.Conn{one, one, two} {
			must(client.QueueSubscribe(subject, "workers", receive.take))
			ok(client.Flush())
		}
		publish(publisher, subject, 100)
		ok(publisher.Flush())
		drained(one, two)
		found := receive.received()
		sort.Strings(found)
		return found
	},
	"queue_group_on_overlapping_patterns": func(c *connections, subject string) any {
		one, two, receive := c.connect(), c.connect(), receiver{}
		must(one.QueueSubscribe(subject+".*", "workers", receive.take))
		must(two.QueueSubscribe(subject+".>", "workers", receive.take))
		ok(one.Flush())
		ok(two.Flush())
		publish(one, subject+".a", 100)
		ok(one.Flush())
		drained(one, two)
		found := receive.received()
		sort.Strings(found)
		return found
	},
	"largest_payload": func(c *connections, subject string) any {
		client := c.connect()
		subscription := must(client.SubscribeSync(subject))
		ok(client.Publish(subject, make([]byte, payloadBytes)))
		return []any{len(next(subscription, 1)[0]), text(client.Publish(subject, make([]byte, payloadBytes+1)))}
	},
	"invalid_subjects": func(c *connections, subject string) any {
		client := c.connect()
		subscription := must(client.SubscribeSync(subject + ".>"))
		empty, wildcard := client.Publish(subject+"..x", []byte("0")), client.Publish(subject+".*", []byte("1"))
		flushed := client.Flush()
		waiting, _, _ := subscription.Pending()
		return []any{text(empty), text(wildcard), text(flushed), waiting, client.IsConnected()}
	},
	// Penstock refuses the first message, as it cannot store it; the client goes on.
	"publish_with_an_invalid_delay": func(c *connections, subject string) any {
		client := c.connect()
		message := nats.NewMsg(subject)
		message.Header.Set("Delay", "soon")
		ok(client.PublishMsg(message))
		ok(client.Flush())
		subscription := must(client.SubscribeSync(subject))
		publish(client, subject, 3)
		return next(subscription, 3)
	},
	"pedantic": func(c *connections, subject string) any {
		client := c.connect(func(options *nats.Options) error {
			options.Pedantic = true
			return nil
		})
		ok(client.Publish(subject+".*", []byte("0")))
		until(client.IsClosed)
		return text(client.LastError())
	},
	"verbose": func(c *connections, subject string) any {
		client := c.connect(func(options *nats.Options) error {
			options.Verbose = true
			return nil
		})
		subscription := must(client.SubscribeSync(subject))
		publish(client, subject, 100)
		ok(client.Flush())
		return next(subscription, 100)
	},
	"reconnect": func(c *connections, subject string) any {
		dialer, reconnected := &cuttable{}, make(chan bool, 1)
		client := c.connect(
			nats.SetCustomDialer(dialer),
			nats.MaxReconnects(10),
			func(options *nats.Options) error {
				options.AllowReconnect = true
				return nil
			},
			nats.ReconnectWait(time.Millisecond),
			nats.ReconnectHandler(func(*nats.Conn) { reconnected <- true }),
		)
		plain := must(client.SubscribeSync(subject))
		limited := must(client.SubscribeSync(subject))
		ok(limited.AutoUnsubscribe(3))
		publish(client, subject, 2)
		ok(client.Flush())
		dialer.cut()
		select {
		case <-reconnected:
		case <-time.After(patience):
			panic(nats.ErrTimeout)
		}
		ok(client.Flush())
		publish(c.connect(), subject, 3)
		return []any{next(plain, 5), next(limited, 3)}
	},
	"jetstream_is_not_there": func(c *connections, subject string) any {
		stream := must(c.connect().JetStream(nats.MaxWait(shortPatience)))
		_, added := stream.AddStream(&nats.StreamConfig{Name: "S", Subjects: []string{subject}})
		_, published := stream.Publish(subject, nil)
		_, bucket := stream.CreateKeyValue(&nats.KeyValueConfig{Bucket: "B"})
		return []any{text(added), text(published), text(bucket)}
	},
	"service": func(c *connections, subject string) any {
		client, other := c.connect(), c.connect()
		added := must(micro.AddService(client, micro.Config{
			Name:    "echo",
			Version: "1.0.0",
			Endpoint: micro.Endpoint{
				Subject: subject,
				Handler: func(asked *micro.Request) { ok(asked.Respond(asked.Data())) },
			},
		}))
		ok(client.Flush())
		answer := must(other.Request(subject, []byte("hello"), shortPatience))
		var ping micro.Ping
		ok(json.Unmarshal(must(other.Request("$SRV.PING.echo", nil, shortPatience)).Data, &ping))
		stopped := added.Stop()
		ok(client.Flush())
		_, gone := other.Request(subject, nil, shortPatience)
		return []any{string(answer.Data), ping.Name, ping.Version, text(stopped), text(gone)}
	},
}

// Dials, and can cut the connection that it made last.
type cuttable struct {
	sync.Mutex
	last net.Conn
}

func (c *cuttable) Dial(network, address string) (net.Conn, error) {
	made, err := net.DialTimeout(network, address, patience)
	c.Lock()
	defer c.Unlock()
	c.last = made
	return made, err
}

func (c *cuttable) cut() {
	c.Lock()
	defer c.Unlock()
	ok(c.last.Close())
}

func run(work check, url, subject string) (result any) {
	c := &connections{url: url}
	defer c.close()
	defer func() {
		if reason := recover(); reason != nil {
			result = fmt.Sprintf("failed: %v", reason)
		}
	}()
	return work(c, subject)
}

func main() {
	found := map[string]any{}
	for name, work := range checks {
		found[name] = run(work, os.Args[1], os.Args[2]+"."+name)
	}
	ok(json.NewEncoder(os.Stdout).Encode(found))
}
