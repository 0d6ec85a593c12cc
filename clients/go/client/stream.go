package client

import (
	"context"
	"io"
	"time"

	"github.com/golang/protobuf/proto"
	"google.golang.org/grpc/status"

	pb "maniple.dev/gen/maniple/v1"
)

const abortTimeout = 5 * time.Second

// Event is *pb.GenerateResponse_Started_, _Chunk, _Finished or _Done, as it came, or *Recovering.
type Event interface{}

// Recovering is told when a stream broke and something is done about it. With StartOver, what came before is void.
type Recovering struct {
	Action  Action
	Problem *Problem
	Delay   time.Duration
	Target  string // which server is asked next
}

// Stream is one generation, whatever happens to the servers under it. Not safe for several goroutines.
type Stream struct {
	ctx      context.Context
	servers  *servers
	request  *pb.GenerateRequest
	recovery recovery

	call       func() (*pb.GenerateResponse, error) // reads the next message; nil while there is no call
	cancel     context.CancelFunc
	wait       time.Duration // before the next call
	sentBefore bool
	inBand     *Problem

	started  *pb.GenerateResponse_Started
	cursors  map[uint32]*pb.ResumeRequest_Cursor
	finished map[uint32]bool
	done     bool // nothing more comes
	ended    bool // the server knows that
}

// Recv returns the next event, io.EOF after the last one of a good stream, or a *Problem.
func (s *Stream) Recv() (Event, error) {
	for !s.done {
		if s.call == nil {
			if problem := s.open(); problem != nil {
				return nil, problem
			}
		}
		response, err := s.call()
		if err == nil {
			if event := s.take(response); event != nil {
				return event, nil
			}
			continue
		}
		problem := ProblemOf(err)
		if s.inBand != nil {
			problem = richer(s.inBand, problem)
		}
		return s.goOn(problem)
	}
	return nil, io.EOF
}

// Close cancels what still runs: the server frees what it held within a step.
func (s *Stream) Close() {
	begun := s.started != nil && !s.ended
	s.done, s.ended = true, true
	s.hangUp()
	if begun && s.request.DetachGraceS > 0 {
		// The server was asked to go on when a connection ends, so it must be told. If it cannot be, it is not needed.
		ctx, cancel := context.WithTimeout(context.Background(), abortTimeout)
		defer cancel()
		_, _ = s.servers.now().inference.Abort(ctx, &pb.AbortRequest{RequestId: s.request.RequestId})
	}
}

func (s *Stream) hangUp() {
	if s.cancel != nil {
		s.cancel()
	}
	s.call, s.cancel, s.inBand = nil, nil, nil
}

// open begins the next call: Generate, or Resume once the request has begun. The deadline of the context goes with it.
func (s *Stream) open() *Problem {
	select {
	case <-s.ctx.Done():
		return ProblemOf(status.FromContextError(s.ctx.Err()).Err())
	case <-time.After(s.wait):
	}
	ctx, cancel := context.WithCancel(s.ctx)
	s.cancel = cancel
	stub := s.servers.now().inference
	if s.started == nil {
		call, err := stub.Generate(ctx, s.request)
		s.call = func() (*pb.GenerateResponse, error) {
			if err != nil {
				return nil, err
			}
			return call.Recv()
		}
		return nil
	}
	call, err := stub.Resume(ctx, s.resume())
	s.call = func() (*pb.GenerateResponse, error) {
		if err != nil {
			return nil, err
		}
		message, err := call.Recv()
		return message.GetResponse(), err
	}
	return nil
}

// resume says what is here already: ids and bytes of text, per sample.
func (s *Stream) resume() *pb.ResumeRequest {
	request := &pb.ResumeRequest{RequestId: s.started.RequestId, ResumeToken: s.started.ResumeToken}
	for _, cursor := range s.cursors {
		request.Cursors = append(request.Cursors, cursor)
	}
	return request
}

// take keeps what a message says and returns it, or nil if it is no news: a resumed stream says again what began.
func (s *Stream) take(response *pb.GenerateResponse) Event {
	switch event := response.GetEvent().(type) {
	case *pb.GenerateResponse_Started_:
		if s.started != nil {
			return nil
		}
		s.recovery.heard()
		s.started = event.Started
		return event
	case *pb.GenerateResponse_Chunk_:
		s.recovery.heard()
		s.count(event.Chunk.Index, event.Chunk.TokenIds, event.Chunk.Text)
		return event
	case *pb.GenerateResponse_Finished_:
		if s.finished[event.Finished.Index] {
			return nil
		}
		s.recovery.heard()
		s.finished[event.Finished.Index] = true
		s.count(event.Finished.Index, event.Finished.TokenIds, event.Finished.Text)
		return event
	case *pb.GenerateResponse_Done_:
		s.ended = true
		s.Close()
		return event
	case *pb.GenerateResponse_Error:
		s.inBand = problemInBand(event.Error)
	}
	return nil // an event of a newer server
}

func (s *Stream) count(index uint32, ids []uint32, text string) {
	cursor := s.cursors[index]
	if cursor == nil {
		cursor = &pb.ResumeRequest_Cursor{Index: index}
		s.cursors[index] = cursor
	}
	cursor.NumTokens += uint32(len(ids))
	cursor.NumTextBytes += uint64(len(text))
}

func (s *Stream) goOn(problem *Problem) (Event, error) {
	s.hangUp()
	action, delay := s.recovery.after(problem, time.Now(), s.started != nil, s.sentBefore)
	if action == GiveUp || s.ctx.Err() != nil {
		s.done, s.ended = true, problem.Reason != ""
		return nil, problem
	}
	if action != StartOver {
		if err := s.servers.move(problem.OwnerAddress); err != nil {
			return nil, err
		}
	}
	s.wait, s.sentBefore = delay, action == SendAgain
	if action == StartOver {
		// The old id is taken for a minute.
		s.request = proto.Clone(s.request).(*pb.GenerateRequest)
		s.request.RequestId = newRequestID()
		s.forget()
	}
	return &Recovering{action, problem, delay, s.servers.now().target}, nil
}

// forget makes it a stream that has brought nothing.
func (s *Stream) forget() {
	s.started, s.cursors, s.finished = nil, map[uint32]*pb.ResumeRequest_Cursor{}, map[uint32]bool{}
}
