// Package client talks to a Maniple server, or to several that take over from each other.
//
// A generation goes on by itself where that is possible: it is sent again if it never began, resumed where a server
// was lost or replaced, and begun anew where its group of workers was lost. docs/clients.md has the rules.
package client

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"time"

	"github.com/golang/protobuf/proto"
	"google.golang.org/grpc"

	pb "maniple.dev/gen/maniple/v1"
)

// Patience is how long and how often a stream tries to go on.
type Patience struct {
	RetryFor   time.Duration // how long it may bring nothing after it broke
	StartsOver int           // how often it may begin anew
}

// Client is a connection to one of several servers.
type Client struct{ servers *servers }

// New connects in the background. The first target is preferred. transport is grpc.WithInsecure() or credentials.
func New(targets []string, transport ...grpc.DialOption) (*Client, error) {
	s, err := connect(targets, transport)
	if err != nil {
		return nil, err
	}
	return &Client{s}, nil
}

// Close ends the connections; what still streams is cancelled.
func (c *Client) Close() { c.servers.close() }

// Generate begins a generation. Deadline and cancellation of ctx are those of the request.
func (c *Client) Generate(ctx context.Context, request *pb.GenerateRequest, patience Patience) *Stream {
	request = proto.Clone(request).(*pb.GenerateRequest)
	if request.RequestId == "" {
		request.RequestId = newRequestID() // ours, so that sending it again cannot run it twice
	}
	s := &Stream{ctx: ctx, servers: c.servers, request: request, recovery: newRecovery(patience)}
	s.forget()
	return s
}

// Inference returns the calls that are asked and answered once.
func (c *Client) Inference() pb.InferenceServiceClient { return c.servers.now().inference }

// Admin returns the calls of operators.
func (c *Client) Admin() pb.AdminServiceClient { return c.servers.now().admin }

func newRequestID() string {
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		panic(err) // no source of randomness: nothing can be done well
	}
	return hex.EncodeToString(id[:])
}
