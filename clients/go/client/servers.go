package client

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"

	pb "maniple.dev/gen/maniple/v1"
)

var options = []grpc.DialOption{
	// Retries are decided here, where it is known what has begun. gRPC's own would not know.
	grpc.WithDisableRetry(),
	// Finds a dead peer while a generation is silent. Proxies do not count pings as traffic.
	grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
	// The default waits up to two minutes before it connects again; a server that restarts is back in seconds.
	grpc.WithConnectParams(grpc.ConnectParams{
		Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
		MinConnectTimeout: 5 * time.Second,
	}),
	// Answers with log-probabilities may be longer than the default of 4 MiB.
	grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64 << 20)),
}

type server struct {
	target    string
	conn      *grpc.ClientConn
	inference pb.InferenceServiceClient
	admin     pb.AdminServiceClient
}

// servers are one or several servers of the same model, any of which may take over from another.
type servers struct {
	dial    []grpc.DialOption
	all     []*server
	present int
}

func connect(targets []string, transport []grpc.DialOption) (*servers, error) {
	s := &servers{dial: append(transport, options...)}
	for _, target := range targets {
		if _, err := s.add(target); err != nil {
			s.close()
			return nil, err
		}
	}
	return s, nil
}

func (s *servers) add(target string) (int, error) {
	conn, err := grpc.Dial(target, s.dial...) // returns at once; connects in the background
	if err != nil {
		return 0, err
	}
	s.all = append(s.all, &server{target, conn, pb.NewInferenceServiceClient(conn), pb.NewAdminServiceClient(conn)})
	return len(s.all) - 1, nil
}

func (s *servers) now() *server { return s.all[s.present] }

// move turns to the server that was named as the owner of a request, or else to the next in turn.
func (s *servers) move(owner string) error {
	if owner == "" {
		s.present = (s.present + 1) % len(s.all)
		return nil
	}
	for i, one := range s.all {
		if one.target == owner {
			s.present = i
			return nil
		}
	}
	added, err := s.add(owner)
	if err == nil {
		s.present = added
	}
	return err
}

func (s *servers) close() {
	for _, one := range s.all {
		one.conn.Close()
	}
}
