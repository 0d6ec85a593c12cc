// Maniple from the command line, in Go: streams a generation and does about errors what can be done about them.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"maniple.dev/client"
	pb "maniple.dev/gen/maniple/v1"
)

const usage = `usage: maniple-go VERB [flags]

  generate              stream a generation of --prompt or --token-ids
  abort ID              end a running request
  tokenize TEXT         show the token ids of a text
  model                 show what is served
  status                show what the server is doing

flags:
`

type settings struct {
	targets, prompt, tokenIDs, requestID, ca, tokenFile string
	maxTokens, cancelAfter, startOver                   uint
	temperature, deadline, retryFor, detachGrace        float64
	seed                                                int64
	ignoreEOS, json                                     bool
}

func parse(words []string) (verb string, s settings, rest []string, err error) {
	flags := flag.NewFlagSet("maniple-go", flag.ContinueOnError)
	flags.Usage = func() { fmt.Fprint(os.Stderr, usage); flags.PrintDefaults() }
	target := os.Getenv("MANIPLE_SERVER")
	if target == "" {
		target = "127.0.0.1:50051"
	}
	flags.StringVar(&s.targets, "target", target, "`host:port` of the server, or several with commas (or MANIPLE_SERVER)")
	flags.StringVar(&s.prompt, "prompt", "", "`text` to continue")
	flags.StringVar(&s.tokenIDs, "token-ids", "", "`ids` to continue, with commas")
	flags.StringVar(&s.requestID, "request-id", "", "`id` of the request (default: drawn)")
	flags.UintVar(&s.maxTokens, "max-tokens", 64, "at most so many `tokens`")
	flags.Float64Var(&s.temperature, "temperature", -1, "0 is greedy (default: the server's)")
	flags.Int64Var(&s.seed, "seed", -1, "fixes what is sampled (default: none)")
	flags.BoolVar(&s.ignoreEOS, "ignore-eos", false, "go on after the end of text")
	flags.Float64Var(&s.deadline, "deadline", 0, "end the request after so many `seconds` (default: never)")
	flags.UintVar(&s.cancelAfter, "cancel-after", 0, "cancel after so many `tokens` (default: never)")
	flags.Float64Var(&s.retryFor, "retry-for", 30, "give up after so many `seconds` without a word")
	flags.Float64Var(&s.detachGrace, "detach-grace", 0, "the request goes on so many `seconds` without a connection")
	flags.UintVar(&s.startOver, "start-over", 1, "begin anew so `often` when what had begun is lost")
	flags.StringVar(&s.ca, "tls-ca", "", "use TLS, and trust the certificates in this `file`")
	flags.StringVar(&s.tokenFile, "token-file", "", "send the bearer token in this `file` (needs --tls-ca)")
	flags.BoolVar(&s.json, "json", false, "print one JSON object a line")
	if len(words) == 0 || strings.HasPrefix(words[0], "-") {
		flags.Usage()
		return "", s, nil, flag.ErrHelp
	}
	// The package stops at the first word that is no flag; here they may come in any order.
	for words, verb = words[1:], words[0]; err == nil && len(words) > 0; {
		if err = flags.Parse(words); err == nil && flags.NArg() > 0 {
			rest, words = append(rest, flags.Arg(0)), flags.Args()[1:]
		} else {
			words = nil
		}
	}
	return verb, s, rest, err
}

func (s *settings) request() (*pb.GenerateRequest, error) {
	maxTokens := uint32(s.maxTokens)
	sampling := &pb.SamplingParams{MaxTokens: &maxTokens, IgnoreEos: s.ignoreEOS}
	if s.temperature >= 0 {
		temperature := float32(s.temperature)
		sampling.Temperature = &temperature
	}
	if s.seed >= 0 {
		seed := uint64(s.seed)
		sampling.Seed = &seed
	}
	request := &pb.GenerateRequest{RequestId: s.requestID, Sampling: sampling, DetachGraceS: float32(s.detachGrace)}
	if s.tokenIDs == "" {
		request.Prompt = &pb.GenerateRequest_Text{Text: s.prompt}
		return request, nil
	}
	ids := &pb.TokenIds{}
	for _, word := range strings.Split(s.tokenIDs, ",") {
		id, err := strconv.ParseUint(strings.TrimSpace(word), 10, 32)
		if err != nil {
			return nil, fmt.Errorf("--token-ids: %q is no token id", word)
		}
		ids.Ids = append(ids.Ids, uint32(id))
	}
	request.Prompt = &pb.GenerateRequest_TokenIds{TokenIds: ids}
	return request, nil
}

func (s *settings) connect() (*client.Client, error) {
	targets := strings.Split(s.targets, ",")
	if s.ca == "" && s.tokenFile != "" {
		return nil, errors.New("--token-file needs --tls-ca")
	}
	if s.ca == "" {
		return client.New(targets, grpc.WithInsecure())
	}
	creds, err := credentials.NewClientTLSFromFile(s.ca, "")
	if err != nil {
		return nil, err
	}
	transport := []grpc.DialOption{grpc.WithTransportCredentials(creds)}
	if s.tokenFile != "" {
		transport = append(transport, grpc.WithPerRPCCredentials(bearer(s.tokenFile)))
	}
	return client.New(targets, transport...)
}

// bearer is a file with a token, read for each call: it may be renewed.
type bearer string

func (file bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	token, err := os.ReadFile(string(file))
	if err != nil {
		return nil, err
	}
	return map[string]string{"authorization": "Bearer " + strings.TrimSpace(string(token))}, nil
}

func (bearer) RequireTransportSecurity() bool { return true }

// context returns the context of a call: it ends with the deadline, and with Ctrl-C.
func (s *settings) context() (context.Context, context.CancelFunc) {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	if s.deadline <= 0 {
		return ctx, cancel
	}
	ctx, cancelDeadline := context.WithTimeout(ctx, time.Duration(s.deadline*float64(time.Second)))
	return ctx, func() { cancelDeadline(); cancel() }
}

func main() { os.Exit(run(os.Args[1:])) }

func run(words []string) int {
	verb, s, rest, err := parse(words)
	if err != nil {
		return 2
	}
	out := printer{json: s.json}
	c, err := s.connect()
	if err != nil {
		return out.usage(err)
	}
	defer c.Close()
	ctx, cancel := s.context()
	defer cancel()
	switch {
	case verb == "generate" && len(rest) == 0:
		request, err := s.request()
		if err != nil {
			return out.usage(err)
		}
		return generate(ctx, c, request, s, out)
	case verb == "abort" && len(rest) == 1:
		answer, err := c.Inference().Abort(ctx, &pb.AbortRequest{RequestId: rest[0]})
		return out.answer(err, facts{"event": "aborted", "was_running": answer.GetWasRunning()})
	case verb == "tokenize" && len(rest) == 1:
		input := &pb.TokenizeRequest_Text{Text: rest[0]}
		answer, err := c.Inference().Tokenize(ctx, &pb.TokenizeRequest{Input: input})
		return out.answer(err, facts{"event": "tokens", "token_ids": ids(answer.GetTokenIds())})
	case verb == "model" && len(rest) == 0:
		answer, err := c.Inference().GetModel(ctx, &pb.GetModelRequest{})
		return out.answer(err, facts{"event": "model", "names": answer.GetServedNames(),
			"max_model_len": answer.GetMaxModelLen(), "vocab_size": answer.GetVocabSize()})
	case verb == "status" && len(rest) == 0:
		answer, err := c.Admin().GetStatus(ctx, &pb.GetStatusRequest{})
		return out.answer(err, statusFacts(answer))
	}
	return out.usage(fmt.Errorf("no such verb, or not its arguments: %s %s", verb, strings.Join(rest, " ")))
}

func statusFacts(status *pb.GetStatusResponse) facts {
	var running, waiting uint32
	for _, group := range status.GetGroups() {
		running += group.GetNumRunning()
		waiting += group.GetNumWaiting()
	}
	return facts{"event": "status", "ready": status.GetReady(), "why_not": status.GetNotReadyReason(),
		"num_running": running, "num_waiting": waiting}
}

func generate(ctx context.Context, c *client.Client, request *pb.GenerateRequest, s settings, out printer) int {
	patience := client.Patience{
		RetryFor:   time.Duration(s.retryFor * float64(time.Second)),
		StartsOver: int(s.startOver),
	}
	stream := c.Generate(ctx, request, patience)
	defer stream.Close()
	numTokens := 0
	for {
		event, err := stream.Recv()
		if err != nil {
			return out.end(err)
		}
		switch event := event.(type) {
		case *client.Recovering:
			out.recovering(event)
			if event.Action == client.StartOver {
				numTokens = 0
			}
		case *pb.GenerateResponse_Chunk_:
			out.event(event)
			numTokens += len(event.Chunk.TokenIds)
			if s.cancelAfter > 0 && numTokens >= int(s.cancelAfter) {
				stream.Close()
				return out.answer(nil, facts{"event": "cancelled"})
			}
		default:
			out.event(event)
		}
	}
}
