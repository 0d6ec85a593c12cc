package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sort"
	"strings"

	"google.golang.org/grpc/codes"

	"maniple.dev/client"
	pb "maniple.dev/gen/maniple/v1"
)

type facts map[string]interface{}

// printer shows what happens: text to standard output and the rest to standard error, or everything as JSON lines.
type printer struct{ json bool }

func (p printer) line(f facts) {
	line, err := json.Marshal(f)
	if err != nil {
		panic(err) // facts are numbers, strings and lists of them
	}
	fmt.Println(string(line))
}

func (p printer) event(event client.Event) {
	f := facts{}
	switch event := event.(type) {
	case *pb.GenerateResponse_Started_:
		f = facts{"event": "started", "request_id": event.Started.RequestId,
			"num_prompt_tokens": event.Started.NumPromptTokens, "num_cached_tokens": event.Started.NumCachedTokens}
	case *pb.GenerateResponse_Chunk_:
		f = facts{"event": "chunk", "index": event.Chunk.Index, "token_ids": ids(event.Chunk.TokenIds),
			"text": event.Chunk.Text}
		if !p.json {
			fmt.Print(event.Chunk.Text)
		}
	case *pb.GenerateResponse_Finished_:
		reason := strings.ToLower(strings.TrimPrefix(event.Finished.Reason.String(), "FINISH_REASON_"))
		f = facts{"event": "finished", "index": event.Finished.Index, "reason": reason,
			"num_output_tokens": event.Finished.NumOutputTokens}
	case *pb.GenerateResponse_Done_:
		f = facts{"event": "done", "num_output_tokens": event.Done.NumOutputTokens, "duration_s": event.Done.DurationS}
		if !p.json {
			fmt.Println()
		}
	}
	if p.json {
		p.line(f)
	}
}

func (p printer) recovering(r *client.Recovering) {
	what := map[client.Action]string{
		client.SendAgain: "sending_again", client.Resume: "resuming", client.StartOver: "starting_over"}[r.Action]
	if p.json {
		f := problemFacts(r.Problem)
		f["event"], f["delay_s"], f["target"] = what, r.Delay.Seconds(), r.Target
		p.line(f)
		return
	}
	fmt.Fprintf(os.Stderr, "\n[%s: %s in %v at %s]\n", r.Problem, strings.ReplaceAll(what, "_", " "), r.Delay, r.Target)
}

// end shows how a stream ended and returns the exit code.
func (p printer) end(err error) int {
	if err == io.EOF {
		return 0
	}
	return p.answer(err, nil)
}

// answer shows an answer, or why there is none, and returns the exit code.
func (p printer) answer(err error, f facts) int {
	if err == nil && p.json {
		p.line(f)
	} else if err == nil {
		names := make([]string, 0, len(f))
		for name := range f {
			names = append(names, name)
		}
		sort.Strings(names)
		for _, name := range names {
			if name != "event" {
				fmt.Printf("%s: %v\n", name, f[name])
			}
		}
	}
	if err == nil {
		return 0
	}
	problem := client.ProblemOf(err)
	if p.json {
		f := problemFacts(problem)
		f["event"] = "error"
		p.line(f)
	} else {
		fmt.Fprintf(os.Stderr, "\n%s\n", problem)
	}
	return 1
}

func (p printer) usage(err error) int {
	fmt.Fprintf(os.Stderr, "maniple-go: %v; see maniple-go --help\n", err)
	return 2
}

func problemFacts(p *client.Problem) facts {
	violations := []facts{}
	for _, one := range p.Violations {
		violations = append(violations, facts{"field": one.Field, "description": one.Description})
	}
	return facts{"status": statusName(p.Code), "reason": p.Reason, "message": p.Message, "violations": violations,
		"incident_id": p.IncidentID}
}

// statusName returns a code as the specification writes it: Go writes "DeadlineExceeded", others DEADLINE_EXCEEDED.
func statusName(code codes.Code) string {
	var name strings.Builder
	for i, letter := range code.String() {
		if i > 0 && letter >= 'A' && letter <= 'Z' && code != codes.OK {
			name.WriteByte('_')
		}
		name.WriteRune(letter)
	}
	return strings.ToUpper(name.String())
}

// ids makes an empty list of none, which JSON would otherwise show as null.
func ids(some []uint32) []uint32 { return append([]uint32{}, some...) }
