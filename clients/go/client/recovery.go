package client

import (
	"math/rand"
	"time"

	"google.golang.org/grpc/codes"
)

// Action is what follows a problem.
type Action int

const (
	GiveUp    Action = iota // it is the caller's
	SendAgain               // the same request with the same id: it did not begin, and an id is admitted once
	Resume                  // take it up where it broke, perhaps at another server
	StartOver               // what had begun is gone: a new request with a new id
)

const (
	firstDelay = 50 * time.Millisecond
	lastDelay  = time.Second
)

// actionAfter is the table of docs/errors.md, as far as it can be acted on.
//
// begun: the stream brought `started`, and with it the right to resume. sentBefore: this id was sent once already.
func actionAfter(p *Problem, begun, sentBefore bool) Action {
	groupLost := p.Code == codes.Aborted && p.Reason == "GROUP_LOST"
	if begun {
		switch {
		case p.IsTransportLoss(), p.Code == codes.Unavailable, p.Code == codes.Aborted && p.Reason == "TAKEN_OVER":
			return Resume
		case groupLost, p.Reason == "RESUME_LOST", p.Reason == "UNKNOWN_REQUEST":
			return StartOver
		}
		return GiveUp
	}
	switch {
	case p.IsTransportLoss(), p.Code == codes.Unavailable, p.Code == codes.ResourceExhausted && p.Reason != "":
		return SendAgain
	case groupLost, p.Code == codes.Aborted && p.Reason == "TAKEN_OVER":
		return StartOver // it ran, but nothing of it reached us
	case p.Reason == "DUPLICATE_REQUEST" && sentBefore:
		return StartOver // the first try had been admitted, and ended with its connection
	}
	return GiveUp
}

// recovery counts the attempts of one stream. Whatever it brings starts the count anew.
type recovery struct {
	giveUpAfter    time.Duration
	startsOverLeft int
	brokenSince    time.Time
	delay          time.Duration
	jitter         *rand.Rand
}

func newRecovery(patience Patience) recovery {
	return recovery{
		giveUpAfter:    patience.RetryFor,
		startsOverLeft: patience.StartsOver,
		delay:          firstDelay,
		// Before Go 1.20 the package's own source gives every process the same numbers.
		jitter: rand.New(rand.NewSource(time.Now().UnixNano())),
	}
}

func (r *recovery) heard() {
	r.brokenSince, r.delay = time.Time{}, firstDelay
}

// after says what to do about a problem, and after how long.
func (r *recovery) after(p *Problem, now time.Time, begun, sentBefore bool) (Action, time.Duration) {
	action := actionAfter(p, begun, sentBefore)
	if action == StartOver {
		if r.startsOverLeft == 0 {
			return GiveUp, 0
		}
		r.startsOverLeft--
	}
	if r.brokenSince.IsZero() {
		r.heard()
		r.brokenSince = now
	}
	if action == GiveUp || now.Sub(r.brokenSince) >= r.giveUpAfter {
		return GiveUp, 0
	}
	delay := r.delay
	r.delay = min(2*r.delay, lastDelay)
	if delay < p.RetryAfter {
		delay = p.RetryAfter
	}
	// Up to a fifth more, so that clients that broke together do not come back together.
	return action, delay + time.Duration(r.jitter.Int63n(int64(delay)/5+1))
}

func min(a, b time.Duration) time.Duration {
	if a < b {
		return a
	}
	return b
}
