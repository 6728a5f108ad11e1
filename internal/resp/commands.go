package resp

import "fmt"

// Commands follows what a client sends: arrays of strings. The zero Commands stands between commands.
type Commands struct {
	// Command is the command that is read, or was last.
	Command Command

	state commandState
	args  int // still to come
	left  int // bytes of the string that are still to come, its CR LF included
}

// Command is what is kept of a command.
type Command struct {
	// Args is how many words it has.
	Args int

	words [2][32]byte
	sizes [2]int
}

// Name is the beginning of the first word.
func (c *Command) Name() []byte { return c.words[0][:c.sizes[0]] }

// Word is the beginning of the second word.
func (c *Command) Word() []byte { return c.words[1][:c.sizes[1]] }

// commandState is what comes next in a command.
type commandState uint8

const (
	atCommand commandState = iota
	inCount
	atArgument
	inLength
	inArgument
)

// Next reads up to the end of one command, and tells whether that was reached.
func (c *Commands) Next(p []byte) (n int, ended bool, err error) {
	for n < len(p) {
		switch b := p[n]; c.state {
		case atCommand, atArgument:
			if b != '*' && (c.state == atCommand || b != '$') {
				return n, false, c.bad(b)
			}
			if c.state == atCommand {
				c.Command.Args, c.Command.sizes = 0, [2]int{}
			}
			c.state++
			c.left = 0
			n++
		case inCount, inLength:
			used, err := c.readNumber(p[n:])
			if err != nil {
				return n, false, err
			}
			n += used
		default:
			used := min(c.left, len(p)-n)
			c.keep(p[n : n+used])
			n += used
			if c.left -= used; c.left > 0 {
				break
			}
			c.Command.Args++
			c.state = atArgument
			if c.args--; c.args == 0 {
				c.state = atCommand
				return n, true, nil
			}
		}
	}
	return n, false, nil
}

// readNumber reads the line of a number.
func (c *Commands) readNumber(p []byte) (int, error) {
	for n, b := range p {
		switch {
		case b >= '0' && b <= '9' && c.left < 1<<40:
			c.left = 10*c.left + int(b-'0')
		case b == '\r':
		case b == '\n' && c.state == inCount && c.left > 0:
			c.args, c.state = c.left, atArgument
			return n + 1, nil
		case b == '\n' && c.state == inLength:
			c.left, c.state = c.left+2, inArgument
			return n + 1, nil
		default:
			return n, c.bad(b)
		}
	}
	return len(p), nil
}

// keep keeps the beginning of one of the first words.
func (c *Commands) keep(text []byte) {
	if i := c.Command.Args; i < len(c.Command.words) {
		text = text[:max(0, min(len(text), c.left-2))]
		c.Command.sizes[i] += copy(c.Command.words[i][c.Command.sizes[i]:], text)
	}
}

func (*Commands) bad(b byte) error {
	return fmt.Errorf("%w: %q in a command", ErrForm, b)
}
