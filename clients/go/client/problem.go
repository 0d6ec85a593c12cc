package client

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "maniple.dev/gen/maniple/v1"
)

const domain = "maniple.dev"

// Violation is one broken rule of a request.
type Violation struct{ Field, Description string }

// Problem says why a call or a stream ended badly. It is an error.
type Problem struct {
	Code         codes.Code
	Reason       string // of the table in docs/errors.md, such as "QUEUE_FULL"; empty where the server did not say it
	Message      string
	RetryAfter   time.Duration // when to come again, where the server said so
	Violations   []Violation
	OwnerAddress string // where the request is, if another control plane has it
	IncidentID   string // under which the server logged a defect
}

func (p *Problem) Error() string {
	if p.Reason == "" {
		return fmt.Sprintf("%s: %s", p.Code, p.Message)
	}
	return fmt.Sprintf("%s %s: %s", p.Code, p.Reason, p.Message)
}

// IsTransportLoss tells whether the connection broke, so that nobody said what became of the request. Behind a proxy
// a killed server shows as Internal ("RST_STREAM"), not as Unavailable. Both come without a reason of ours.
func (p *Problem) IsTransportLoss() bool {
	return p.Reason == "" && (p.Code == codes.Unavailable || p.Code == codes.Internal)
}

// endedEarly stands for a stream that ended in order, but without its last message.
func endedEarly() *Problem {
	return &Problem{Code: codes.Unavailable, Message: "the stream ended before its last message"}
}

// ProblemOf reads the status of a failed call and the details that came with it.
func ProblemOf(err error) *Problem {
	if err == nil {
		return nil
	}
	var known *Problem
	if errors.As(err, &known) {
		return known
	}
	if errors.Is(err, io.EOF) {
		return endedEarly()
	}
	st := status.Convert(err)
	problem := &Problem{Code: st.Code(), Message: st.Message()}
	for _, detail := range st.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.GetDomain() == domain {
				problem.Reason = detail.GetReason()
				problem.OwnerAddress = detail.GetMetadata()["owner_address"]
				problem.IncidentID = detail.GetMetadata()["incident_id"]
			}
		case *errdetails.RetryInfo:
			delay := detail.GetRetryDelay()
			problem.RetryAfter = time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos())
		case *errdetails.BadRequest:
			for _, one := range detail.GetFieldViolations() {
				problem.Violations = append(problem.Violations, Violation{one.GetField(), one.GetDescription()})
			}
		}
	}
	return problem
}

// problemInBand reads the form in which a stream repeats its error, since some proxies lose trailers.
func problemInBand(e *pb.StreamError) *Problem {
	reason := ""
	if e.GetReason() != pb.ErrorReason_ERROR_REASON_UNSPECIFIED {
		reason = strings.TrimPrefix(e.GetReason().String(), "ERROR_REASON_")
	}
	return &Problem{
		Code:         codes.Code(e.GetCode()),
		Reason:       reason,
		Message:      e.GetMessage(),
		OwnerAddress: e.GetOwnerAddress(),
		IncidentID:   e.GetIncidentId(),
	}
}

// richer prefers the status, which has all details, unless something on the way replaced it.
func richer(inBand, status *Problem) *Problem {
	if inBand != nil && inBand.Reason != status.Reason {
		return inBand
	}
	return status
}
